"""Frames as bytes: there and back, refused when newer or damaged, unknown kinds passed over."""

from __future__ import annotations

import random

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.contract.wire import (
    MAJOR,
    Batch,
    ContractError,
    NewerVersion,
    NotAFrame,
    Run,
    batch_of,
    decode,
    encode,
)
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.ledger.fold import apply_events


def some_lab() -> Lab:
    lab = Lab(total=40, connector_share=0.5)
    for _ in range(6):
        lab.arrive(20, max_tokens=6)
        lab.step()
    return lab


def test_a_batch_survives_the_trip() -> None:
    events = [
        Run(Kind.ALLOCATED, 1, 7, [], [3, 4]),
        Run(Kind.RELEASED, 1, 7, [2], [4, 3]),
        Run(Kind.CLOCK, 0, -1, [9], []),
    ]
    batch = batch_of("e", 5, events, sequence=8, wall_ns=1, mono_ns=2, texts={7: "r-7"})
    again = decode(encode(batch))
    assert isinstance(again, Batch)
    assert list(again.events()) == events
    assert (again.engine, again.epoch, again.sequence, again.texts) == ("e", 5, 8, {7: "r-7"})


def test_every_kind_has_a_schema_and_a_number_of_its_own() -> None:
    assert set(SCHEMA) == set(Kind)
    assert len({int(kind) for kind in Kind}) == len(Kind)


def test_what_an_engine_sends_fits_the_schema() -> None:
    for frame in some_lab().frames:
        assert isinstance(frame, Batch)
        for event in frame.events():
            fields = SCHEMA[Kind(event.kind)]
            fixed = [name for name in fields.args if not name.endswith("*")]
            assert len(event.args) == len(fixed) or (len(event.args) > len(fixed) and fields.args[-1].endswith("*"))
            assert bool(event.ids) <= bool(fields.ids)
            assert (event.request >= 0) == fields.of_request


def test_a_newer_major_version_is_refused_by_name() -> None:
    payload = bytearray(encode(batch_of("e", 1, [])))
    payload[2] = MAJOR + 1
    with pytest.raises(NewerVersion, match=rf"version {MAJOR + 1}\.0 .* upgrade kvscope"):
        decode(bytes(payload))


def test_a_newer_minor_version_is_read() -> None:
    payload = bytearray(encode(batch_of("e", 1, [Run(Kind.CLOCK, 0, -1, [5], [])])))
    payload[3] = 99
    assert decode(bytes(payload)) is not None
    payload[4] = ord("Z")  # a type of frame that we have never heard of
    assert decode(bytes(payload)) is None


def test_an_unknown_kind_of_event_is_skipped_and_the_rest_understood() -> None:
    lab = Lab(total=9)
    state = EngineState()

    def apply(batch: Batch) -> None:
        apply_events(
            state,
            *(view.cast(code).tolist() for view, code in ((batch.runs, "i"), (batch.args, "q"), (batch.ids, "i"))),
            batch.texts,
        )

    for frame in lab.frames:
        assert isinstance(frame, Batch)
        apply(frame)
    mixed = batch_of(
        "e",
        1,
        [
            Run(Kind.ARRIVED, 0, 1, [10, 4, 4, 0, 1, 2], []),
            Run(9999, 3, 1, [1, 2, 3], [4, 5]),
            Run(Kind.ALLOCATED, 0, 1, [], [2]),
        ],
    )
    apply(mixed)
    assert state.refs[2] == 1
    assert not state.news.anomalies


@pytest.mark.parametrize(
    "payload", [b"", b"KV", b"XX\x01\x00B", b"KV\x01\x00B", b"KV\x01\x00Bgarbage", b"KV\x01\x00B\x91\x01"]
)
def test_what_is_no_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(NotAFrame):
        decode(payload)


def test_mutated_frames_are_refused_or_read_but_never_break_the_fold() -> None:
    lab = some_lab()
    payloads = [encode(frame) for frame in lab.frames] + [encode(lab.keyframe())]
    rng = random.Random(1)
    for _ in range(3000):
        payload = bytearray(rng.choice(payloads))
        for _ in range(rng.randint(1, 4)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        if rng.random() < 0.3:
            del payload[rng.randrange(len(payload)) :]
        try:
            frame = decode(bytes(payload))
        except ContractError:
            continue
        ledger = EngineLedger("lab")
        for good in lab.frames[: rng.randrange(len(lab.frames))]:
            ledger.apply(good)
        if frame is not None:
            ledger.apply(frame)
            ledger.balance()
