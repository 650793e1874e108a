"""Every event kind and every field of a frame with values that no engine sends: nothing escapes, nothing is hidden.

What is accepted adds up as a second fold, written here, says, or the state is marked as in doubt.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from kvscope.lab.second_fold import SecondFold
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.kinds import SCHEMA, Kind
from kvscope.monitor.contract.wire import Batch, ContractError, Keyframe, Run, batch_of, decode, encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.ledger import keyframe_codec
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.query import QUESTIONS
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.sources.live_stream import Received
from kvscope.monitor.terminal.cli import main

ENGINE = "lab@127.0.0.1:0/0"
VALUES = (0, -1, 1, 1 << 31, (1 << 63) - 1, -(1 << 63))
MB_64 = 64 << 20
PLACES = ((-1, []), (2, [7]), (2, [30]))
"""Requests and blocks: none, one that is held, one that is free."""
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


@pytest.mark.parametrize("seed", range(3))
def test_a_second_fold_agrees_through_deferrals_audits_and_losses(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(total=rng.choice((24, 60)), engine=ENGINE, connector_share=0.7, lease_s=rng.choice((0.0, 1.0)), seed=seed)
    ledger, second = EngineLedger(ENGINE), SecondFold()
    fed = compared = deferred = 0
    for step in range(260):
        if rng.random() < 0.4:
            lab.arrive(rng.randint(1, 60), max_tokens=rng.randint(1, 20))
        lab.step()
        for frame in lab.frames[fed:]:
            assert isinstance(frame, Batch)
            if step in (90, 180):  # in flight to both
                continue
            ledger.apply(frame)
            second.add(frame)
        fed = len(lab.frames)
        deferred += bool(second.deferred)
        compared += not second.damaged
        assert not second.differences(ledger), step
    assert deferred > 30
    assert 120 < compared < 260
    assert second.audits > 2
    assert not second.damaged


def special_events(kind: Kind) -> list[Run]:
    """Events of a kind, laid out as the contract says and otherwise, with values that no engine sends."""
    wanted = len(SCHEMA[kind].args)
    events = [Run(kind, 0, request, [value] * wanted, ids) for value in VALUES for request, ids in PLACES]
    events += [Run(kind, group, 2, [1] * wanted, [block]) for block in IDS for group in (0, 99, -1)]
    return [*events, Run(kind, 0, 2, [], []), Run(kind, 0, (1 << 31) - 1, [1] * (wanted + 3), [1, 1, 1])]


def accepted(batch: Batch) -> Batch | None:
    """The batch as a reader decodes it, or None if the edge refuses it."""
    try:
        frame = decode(encode(batch))
    except ContractError:
        return None
    assert isinstance(frame, Batch)
    return frame


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_every_kind_with_every_special_value(kind: Kind) -> None:
    lab = worked()
    for event in special_events(kind):
        pipeline, second = Pipeline(), SecondFold()
        pipeline.feed(lab.frames)
        for frame in lab.frames:
            assert isinstance(frame, Batch)
            second.add(frame)
        ledger = pipeline.fleet.engines[ENGINE]
        assert not second.differences(ledger)
        for offset, events_of_batch in enumerate(([event], [])):
            taken = accepted(after(lab, offset, events_of_batch))
            if taken is None:
                continue
            pipeline.feed([taken])
            if not in_doubt(ledger):  # what the second fold cannot read, the ledger must not have read either
                second.add(taken)
        ask(pipeline)
        assert in_doubt(ledger) or not second.differences(ledger), event
        assert not [failure for failure in pipeline.supervisor.failures() if failure.kind != "detector"], event


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name)
def test_history_doctor_and_api_with_every_special_value(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a kind's events, one after another: each is kept, and no question about them fails."""
    lab = worked()
    batches = [after(lab, offset, [event]) for offset, event in enumerate(special_events(kind))]
    frames = [*lab.frames, *(batch for batch in batches if accepted(batch) is not None)]
    writer = JournalWriter(tmp_path / "recording", lab.packer.epoch)
    for frame in frames:
        writer.append(encode(frame), frame.sequence)
    writer.close()
    target = str(tmp_path / "recording")
    for command in ("doctor --format json", "explain request #2"):
        assert main([*command.split(" "), target]) in (0, 1, 3)
    assert "Traceback" not in "".join(capsys.readouterr())

    keeper, ledger = Keeper(tmp_path / "history", Keep()), EngineLedger(ENGINE, validate=False)
    keeper.start()
    for frame in frames:
        keeper.keep([Received(frame, encode(frame))], ledger)
        ledger.apply(frame)
    keeper.stop([ledger])
    history = History(tmp_path / "history")
    assert len(list(history.batches(ENGINE, 0, 1 << 62))) >= len(frames)

    pipeline = Pipeline(history=history)
    pipeline.feed(frames)
    pipeline.settle()
    last = frames[-1]
    named = {"engine": ENGINE, "id": "2", "by": "owner", "finding": "none", "prompt_tokens": "9", "max_tokens": "9"}
    with TestClient(create_app(pipeline, list), base_url="http://127.0.0.1") as client:  # which raises what escapes
        assert client.get("/metrics").status_code == 200
        for question in QUESTIONS.values():
            fields = question.parameters.__struct_fields__
            parameters = {name: value for name, value in named.items() if name in fields}
            for at in ("", f"{last.epoch}/{last.sequence}/0"):
                asked = parameters | ({"at": at} if at and "at" in fields else {})
                assert client.get(question.route, params=asked).status_code in (200, 400, 404), question.name


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


def test_every_field_of_a_keyframes_state_with_every_special_value() -> None:
    """Fields of the state, and of its first request and deferral: refused, or every question is answered."""
    lab = worked()
    keyframe = lab.keyframe()
    fields = msgspec.msgpack.decode(keyframe.state)
    paths = [(number,) for number in range(len(fields))]
    for number, field in enumerate(fields):
        if isinstance(field, list) and field and isinstance(field[0], list):
            paths += [(number, 0, inner) for inner in range(len(field[0]))]
    refused = 0
    for path in paths:
        for value in FIELD_VALUES.values():
            changed = msgspec.msgpack.decode(keyframe.state)
            inner = changed
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            state = memoryview(msgspec.msgpack.encode(changed))
            try:
                keyframe_codec.load_state(state)
            except ContractError:
                refused += 1
                continue
            pipeline = Pipeline()
            pipeline.feed([msgspec.structs.replace(keyframe, state=state)])
            ask(pipeline)
            assert not [failure for failure in pipeline.supervisor.failures() if failure.kind != "detector"], path
    assert refused > len(paths)


@pytest.mark.parametrize("value", [-2, -(1 << 31)])
def test_owners_below_the_numbers_of_requests_are_refused(value: int) -> None:
    lab = worked()
    fields = msgspec.msgpack.decode(lab.keyframe().state)
    owners = memoryview(fields[9]).cast("i").tolist()
    owners[7] = value
    fields[9] = array("i", owners).tobytes()
    with pytest.raises(ContractError, match="an owner that is not a request"):
        keyframe_codec.load_state(memoryview(msgspec.msgpack.encode(fields)))


def test_300_000_ids_of_one_block_cost_no_more_than_as_many_of_others() -> None:
    """Owners that are kept by number are bounded, or each of them would be searched for each of the rest."""
    lab = worked()
    count = 300_000
    requests = [Run(Kind.ALLOCATED, 0, 2, [], [7] * count), Run(Kind.RELEASED, 0, 2, [1], [7] * count)]
    pipeline = Pipeline()
    pipeline.feed(lab.frames)
    ledger = pipeline.fleet.engines[ENGINE]
    for offset, event in enumerate(requests):
        pipeline.feed([after(lab, offset, [event])])
        assert max(map(len, ledger.state.more.values()), default=0) <= limits.BLOCK_HOLDERS
    assert in_doubt(ledger)
    assert max(len(found.anomaly.detail) for found in ledger.anomalies) < 1_000


LARGE: dict[str, tuple[type[Batch | Keyframe], int, Callable[[], Any]]] = {
    "name": (Batch, 0, lambda: "x" * MB_64),
    "time": (Batch, 5, lambda: "9" * MB_64),
    "text": (Batch, 13, lambda: {1: "x" * MB_64}),
    "texts": (Batch, 13, lambda: dict.fromkeys(range(MB_64 // 64), "x" * 60)),
    "runs": (Batch, 14, lambda: bytes(MB_64 // 20 * 20)),
    "arguments": (Batch, 15, lambda: bytes(MB_64)),
    "ids": (Batch, 16, lambda: bytes(MB_64)),
    "list": (Batch, 14, lambda: [0] * MB_64),
    "state": (Keyframe, 7, lambda: bytes(MB_64)),
    "damage": (Keyframe, 6, lambda: bytes(MB_64)),
}
"""A field of each type, 64 MB long: the frame that has it, its place, and its value."""


@pytest.mark.slow
@pytest.mark.parametrize("field", LARGE)
def test_a_field_of_64_mb_is_cut_refused_or_folded(field: str) -> None:
    cls, place, value = LARGE[field]
    lab = worked()
    frame = after(lab, 0, []) if cls is Batch else lab.keyframe()
    head, body = encode(frame)[:5], msgspec.msgpack.decode(encode(frame)[5:])
    body[place] = value()
    pipeline = Pipeline()
    pipeline.feed(lab.frames)
    try:
        taken = decode(head + msgspec.msgpack.encode(body))
    except ContractError:
        assert field not in ("text", "texts", "runs")
        return
    assert isinstance(taken, Batch | Keyframe)
    if isinstance(taken, Batch):
        assert max(map(len, taken.texts.values()), default=0) <= limits.REQUEST_ID_CHARS
    pipeline.feed([taken])
    ask(pipeline)
    assert not pipeline.supervisor.failures()


def test_a_frame_that_is_too_long_is_refused() -> None:
    with pytest.raises(ContractError, match="are allowed"):
        decode(b"KV\x01\x00B" + bytes(limits.FRAME_BYTES))


def test_history_takes_what_the_edge_lets_in(tmp_path: Path) -> None:
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
