"""vLLM's KV events from a real socket: both wires, both replays, gaps, a new life, and what is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope.lab.kv_publisher import TOKEN, KvPublisher, Recorded, encoded, publishing, recorded, telling
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.contract.samples import KvEvents
from kvscope.monitor.contract.wire import ContractError
from kvscope.monitor.sources.kv_event_stream import (
    KvEndpoint,
    KvEventStream,
    NotKvEvents,
    decode_kv_events,
    discover_kv_endpoints,
    kv_endpoint_at,
)
from kvscope.monitor.sources.targets import SOURCES_PATH
from tests.waiting import PATIENCE_S

RECORDED = recorded("kv-events")
WHAT = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


def reported(batches: Sequence[Recorded]) -> list[tuple[int, list[tuple[Any, ...]]]]:
    """What each batch should come out as."""
    return [
        (
            batch.sequence,
            [
                (WHAT[e["type"]], e.get("block_hashes", []), e.get("parent_block_hash"), e.get("group_idx") or 0)
                for e in batch.events
            ],
        )
        for batch in batches
    ]


def came(records: Sequence[KvEvents]) -> list[tuple[int, list[tuple[Any, ...]]]]:
    return [(int(r.position), [(e.what, e.hashes, e.parent, e.group) for e in r.events]) for r in records]


def until(stream: KvEventStream, enough: Callable[[list[KvEvents]], bool]) -> list[KvEvents]:
    """What the stream says until that holds; a test that waits for ever fails."""
    records: list[KvEvents] = []
    deadline = time.monotonic() + PATIENCE_S
    while not enough(records):
        assert time.monotonic() < deadline, f"{len(records)} batches came"
        records += stream.poll(0.05)
    return records


def listening(publisher: KvPublisher, stream: KvEventStream) -> list[KvEvents]:
    """What came until a first published message did: a subscription takes a moment."""
    deadline = time.monotonic() + PATIENCE_S
    records: list[KvEvents] = []
    while not stream.bad_messages:
        assert time.monotonic() < deadline
        publisher.send(b"kv", b"is anybody there?")
        records += stream.poll(0.01)
    return records


@pytest.mark.parametrize("names_topic", [False, True], ids=["replay up to 0.24", "replay since 0.26"])
@pytest.mark.parametrize("wire", ["arrays", "maps"])
def test_the_past_first_and_then_what_is_published(tmp_path: Path, wire: str, names_topic: bool) -> None:
    half = len(RECORDED) // 2
    with publishing(tmp_path, RECORDED[:half], wire=wire, names_topic=names_topic) as publisher:
        stream = KvEventStream(kv_endpoint_at(publisher.endpoint))
        try:
            records = until(stream, lambda records: len(records) == half)
            records += listening(publisher, stream)
            for batch in RECORDED[half:]:
                publisher.publish(batch.sequence, encoded(batch, wire))
            records += until(stream, lambda records: len(records) == len(RECORDED) - half)
        finally:
            stream.close()
    assert came(records) == reported(RECORDED)
    assert [record.at_ns for record in records] == [int(batch.ts * 1e9) for batch in RECORDED]
    assert {record.engine for record in records} == {f"vllm@{tmp_path}/kv/0"}
    assert (stream.lost, stream.replayed, stream.batches) == (0, half, len(RECORDED))
    assert str(TOKEN).encode() in msgspec.json.encode(RECORDED)
    assert str(TOKEN).encode() not in msgspec.json.encode(records)


@pytest.mark.parametrize("replay", [True, False])
def test_a_gap_is_filled_from_the_replay_or_said(tmp_path: Path, replay: bool) -> None:
    with publishing(tmp_path, replay=replay) as publisher:
        endpoint = publisher.endpoint
        stream = KvEventStream(kv_endpoint_at(endpoint) if replay else KvEndpoint(endpoint, "", "vllm@here"))
        try:
            listening(publisher, stream)
            for batch in RECORDED:
                publisher.publish(batch.sequence, encoded(batch, "maps"), dropped=batch.sequence in (3, 4, 9))
            records = until(stream, lambda records: bool(records) and records[-1].position == str(len(RECORDED) - 1))
        finally:
            stream.close()
    if replay:
        assert came(records) == reported(RECORDED)
        assert stream.lost == 0
        # What was published before the first answer came is in that one already.
        assert publisher.asked[:2] in ([0], [0, 3])
    else:
        assert came(records) == reported([batch for batch in RECORDED if batch.sequence not in (3, 4, 9)])
        assert [(r.position, r.lost) for r in records if r.lost] == [("5", 2), ("10", 1)]
        assert stream.lost == 3


def test_a_past_that_begins_late_and_a_gap_that_nobody_can_fill(tmp_path: Path) -> None:
    with publishing(tmp_path, RECORDED[:9], keep=2) as publisher:
        stream = KvEventStream(kv_endpoint_at(publisher.endpoint))
        try:
            records = until(stream, lambda records: len(records) == 2)
            listening(publisher, stream)
            for batch in RECORDED[9:]:
                publisher.publish(batch.sequence, encoded(batch, "maps"), dropped=batch.sequence < 15)
            records += until(stream, lambda records: bool(records) and records[-1].position == str(len(RECORDED) - 1))
        finally:
            stream.close()
    assert [int(record.position) for record in records[:2]] == [7, 8]
    assert sum(record.lost for record in records) == stream.lost
    kept = {int(record.position) for record in records}
    assert stream.lost == len(set(range(7, len(RECORDED))) - kept)


def test_an_engine_that_is_started_anew(tmp_path: Path) -> None:
    with publishing(tmp_path, replay=False) as publisher:
        stream = KvEventStream(KvEndpoint(publisher.endpoint, "", "vllm@here", 1))
        try:
            listening(publisher, stream)
            for batch in [*RECORDED[:5], *RECORDED[1:4]]:  # the first of its new life was not heard
                publisher.publish(batch.sequence, encoded(batch, "maps"))
            records = until(stream, lambda records: len(records) == 8)
        finally:
            stream.close()
    assert [record.restarted for record in records] == [False] * 5 + [True, False, False]
    assert stream.lost == 0
    assert {record.engine for record in records} == {"vllm@here/1"}


def test_what_is_no_batch_is_counted_and_left_out(tmp_path: Path) -> None:
    with publishing(tmp_path, replay=False) as publisher:
        stream = KvEventStream(KvEndpoint(publisher.endpoint, "", "vllm@here"))
        try:
            listening(publisher, stream)
            before = stream.bad_messages
            publisher.send(b"")
            publisher.send(b"kv", b"12345678", b"garbage", b"more")
            for sequence, payload in enumerate((b"", b"garbage", b"\xc1", msgspec.msgpack.encode([1.0, [["New"]]]))):
                publisher.publish(sequence, payload)
            publisher.publish(4, encoded(RECORDED[0], "maps"))
            records = until(stream, lambda records: bool(records))
        finally:
            stream.close()
    assert came(records) == [(4, reported(RECORDED)[0][1])]
    assert stream.bad_messages - before == 6
    assert stream.lost == 0


def test_an_address_that_is_none() -> None:
    with pytest.raises(ContractError, match="not an endpoint to connect to"):
        KvEventStream(kv_endpoint_at("tcp://nothing"))


# -------------------------------------------------------------------- the wire


def test_a_batch_that_is_a_map_and_fields_of_tomorrow() -> None:
    event = {"type": "BlockStored", "block_hashes": [1, b"two"], "parent_block_hash": b"p", "tomorrow": [1, {2: 3}]}
    payload = msgspec.msgpack.encode({"ts": 1.5, "events": [event], "data_parallel_rank": 3, "tomorrow": 1})
    at_ns, (stored,), rank = decode_kv_events(payload)
    assert (at_ns, rank) == (1_500_000_000, 3)
    assert (stored.hashes, stored.parent) == ([1, b"two"], b"p")


@pytest.mark.parametrize("wire", ["arrays", "maps"])
def test_what_other_tiers_keep_is_left_out(wire: str) -> None:
    events = [
        {"type": "BlockStored", "block_hashes": [n], "parent_block_hash": None, "token_ids": [TOKEN], "block_size": 1}
        | {"lora_id": None, "medium": medium}
        for n, medium in enumerate(["GPU", "CPU", "STORAGE", None])
    ] + [{"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}]
    _, kept, _ = decode_kv_events(encoded(Recorded(0, 1.0, events), wire))
    assert [event.hashes for event in kept] == [[0], [3]]


def test_an_event_that_is_not_known_yet_is_passed_over() -> None:
    assert decode_kv_events(msgspec.msgpack.encode([1.0, [{"type": "BlockMoved", "block_hashes": [1]}], None]))[1] == []


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", b"\x80", msgspec.msgpack.encode([float("nan"), []]), b"\x91" * 100_000]
)
def test_what_is_no_batch(payload: bytes) -> None:
    with pytest.raises(NotKvEvents):
        decode_kv_events(payload)


# -------------------------------------------------------------------- discovery


def test_where_a_server_says_its_events_are() -> None:
    stated = [
        {"data_parallel_rank": 0, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5657"},
        {"data_parallel_rank": 1, "endpoint": "tcp://10.0.0.1:5558", "replay_endpoint": None, "topic": "kv"},
        {"endpoint": "ipc:///run/kv"},
    ]
    with telling(msgspec.json.encode(stated)) as url:
        found = discover_kv_endpoints(url, 5.0)
    name = f"vllm@{url.removeprefix('http://').partition('/')[0]}"
    assert found == [
        KvEndpoint("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657", name, 0),
        KvEndpoint("tcp://10.0.0.1:5558", "", name, 1),
        KvEndpoint("ipc:///run/kv", "", name, None),
    ]


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"[]", 200, "--kv-events-config"),
        (b"{}", 200, "does not name the address of its KV events"),
        (b"<html>", 200, "does not name the address of its KV events"),
        (b"[]", 404, r"answers 404 Not Found.*tcp://HOST:5557"),
        (b"[]", 500, "500"),
    ],
)
def test_a_server_that_says_nothing_of_them(body: bytes, status: int, says: str) -> None:
    with telling(body, status) as url, pytest.raises(ContractError, match=says):
        discover_kv_endpoints(url, 5.0)


def test_a_server_that_is_not_there_and_an_address_that_is_none() -> None:
    with pytest.raises(ContractError, match=r"//127.*does not name the address of its KV events") as failed:
        discover_kv_endpoints(f"http://someone:s3cret@127.0.0.1:9{SOURCES_PATH}", 1.0)
    assert "s3cret" not in str(failed.value)
    with pytest.raises(BadTarget, match="is not an address"):
        discover_kv_endpoints(f"http://[::1{SOURCES_PATH}", 1.0)
