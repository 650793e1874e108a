"""Every event kind and every field of a frame with values that no engine sends: nothing escapes, nothing is hidden.

What is accepted adds up as a second fold, written here, says, or the state is marked as in doubt.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events import limits
from kvscope.monitor.events.kinds import SCHEMA, Kind
from kvscope.monitor.events.wire import Batch, ContractError, Keyframe, Run, batch_of, decode, encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.sources.live_stream import Received
from tests.lab import Lab

ENGINE = "lab@127.0.0.1:0/0"
VALUES = (0, -1, 1, 1 << 31, (1 << 63) - 1, -(1 << 63))
IDS = (0, -1, 7, (1 << 31) - 1, -(1 << 31))
FIELD_VALUES: dict[str, Any] = {
    "zero": 0,
    "minus one": -1,
    "2**31": 1 << 31,
    "2**63": 1 << 63,
    "2**64-1": (1 << 64) - 1,
    "nan": math.nan,
    "inf": math.inf,
    "empty text": "",
    "empty bytes": b"",
    "nothing": None,
    "empty map": {},
    "deep": [[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]],
    "map of nonsense": {1: "x" * 5_000, -1: "{" * 5_000},
}
FIELDS = len(Batch.__struct_fields__)


def worked() -> Lab:
    lab = Lab(total=32, engine=ENGINE, connector_share=0.5)
    for _ in range(8):
        lab.arrive(9)
        lab.step()
    return lab


def after(lab: Lab, offset: int, events: list[Run]) -> Batch:
    last = lab.frames[-1]
    step_ns = (offset + 1) * 600_000_000
    return batch_of(
        ENGINE,
        last.epoch,
        events,
        sequence=last.sequence + 1 + offset,
        wall_ns=last.wall_ns + step_ns,
        mono_ns=last.mono_ns + step_ns,
    )


class References:
    """The second fold: how many references each block has, and nothing else."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts: Counter[int] = Counter()

    def add(self, batch: Batch) -> None:
        for event in batch.events():
            if event.kind in (Kind.ALLOCATED, Kind.REUSED, Kind.PINNED):
                self.counts.update(event.ids)
            elif event.kind in (Kind.RELEASED, Kind.RECLAIMED, Kind.UNPINNED):
                self.counts.subtract(event.ids)

    def agrees(self, ledger: EngineLedger) -> bool:
        return all(ledger.state.refs[block] == self.counts[block] for block in range(1, self.total))


def in_doubt(ledger: EngineLedger) -> bool:
    return bool(ledger.uncertain_since_ns or ledger.anomalies or ledger.losses)


def ask(pipeline: Pipeline) -> None:
    pipeline.settle()
    pipeline.engines()
    pipeline.findings()
    for question in (pipeline.requests, pipeline.block_map, pipeline.memory, pipeline.points):
        try:
            question(ENGINE)
        except KvscopeError:
            continue


@pytest.fixture(autouse=True)
def _no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants are what this test breaks."""
    monkeypatch.delenv("KVSCOPE_VALIDATE", raising=False)


@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_every_kind_with_every_special_value(kind: Kind) -> None:
    lab = worked()
    wanted = len(SCHEMA[kind].args)
    events = [Run(kind, 0, request, [value] * wanted, ids) for value in VALUES for request, ids in ((-1, []), (2, [7]))]
    events += [Run(kind, group, 2, [1] * wanted, [block]) for block in IDS for group in (0, 99, -1)]
    events += [Run(kind, 0, 2, [], []), Run(kind, 0, (1 << 31) - 1, [1] * (wanted + 3), [1, 1, 1])]
    for event in events:
        pipeline, second = Pipeline(), References(32)
        pipeline.feed(lab.frames)
        for frame in lab.frames:
            assert isinstance(frame, Batch)
            second.add(frame)
        ledger = pipeline.fleet.engines[ENGINE]
        assert second.agrees(ledger)
        for offset, events_of_batch in enumerate(([event], [])):
            try:
                frame = decode(encode(after(lab, offset, events_of_batch)))
            except ContractError:
                continue  # refused at the edge
            assert isinstance(frame, Batch)
            second.add(frame)
            pipeline.feed([frame])
        ask(pipeline)
        assert second.agrees(ledger) or in_doubt(ledger), event
        assert not [failure for failure in pipeline.supervisor.failures() if failure.kind != "detector"], event


@pytest.mark.parametrize("value", FIELD_VALUES)
def test_every_field_of_a_frame_with_every_special_value(value: str) -> None:
    lab = worked()
    for frame in (after(lab, 0, [Run(Kind.CLOCK, 0, -1, [5], [])]), lab.keyframe()):
        head, body = encode(frame)[:5], msgspec.msgpack.decode(encode(frame)[5:])
        for field in range(len(body)):
            changed = [*body[:field], FIELD_VALUES[value], *body[field + 1 :]]
            pipeline = Pipeline()
            pipeline.feed(lab.frames[:-1])
            try:
                taken = decode(head + msgspec.msgpack.encode(changed))
            except ContractError:
                continue
            assert isinstance(taken, Batch | Keyframe)
            pipeline.feed([taken])
            pipeline.feed([lab.frames[-1]])
            ask(pipeline)


@pytest.mark.parametrize("field", [0, 13, 14, 16])
def test_a_field_of_64_mb_is_cut_or_refused(field: int) -> None:
    """An engine's name, texts, and columns."""
    lab = worked()
    frame = after(lab, 0, [])
    head, body = encode(frame)[:5], msgspec.msgpack.decode(encode(frame)[5:])
    big: dict[int, Any] = {
        0: "x" * (64 << 20),
        13: {1: "x" * (64 << 20)},
        14: b"\0" * (64 << 20),
        16: b"\0" * (64 << 20),
    }
    body[field] = big[field]
    payload = head + msgspec.msgpack.encode(body)
    try:
        taken = decode(payload)
    except ContractError:
        return
    assert isinstance(taken, Batch)
    assert field == 13
    assert len(taken.texts[1]) == limits.REQUEST_ID_CHARS


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ContractError, match="are allowed"):
        decode(b"KV\x01\x00B" + bytes(limits.FRAME_BYTES))


def test_history_takes_what_the_edge_lets_in(tmp_path: Any) -> None:
    lab = worked()
    keeper = Keeper(tmp_path, Keep())
    keeper.start()
    ledger = EngineLedger(ENGINE, validate=False)
    frames = list(lab.frames)
    frames += [
        after(lab, n, [Run(kind, 0, 2, [VALUES[n % 6]] * len(SCHEMA[kind].args), [7])]) for n, kind in enumerate(Kind)
    ]
    kept = 0
    for frame in frames:
        try:
            taken = decode(encode(frame))
        except ContractError:
            continue
        assert isinstance(taken, Batch | Keyframe)
        keeper.keep([Received(taken, encode(frame))], ledger)
        ledger.apply(taken)
        kept += 1
    keeper.stop([ledger])
    read = list(History(tmp_path).batches(ENGINE, 0, 1 << 62))
    assert len(read) >= kept
