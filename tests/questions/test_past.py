"""What was at a moment, by the watch, is what a fold of all that was said until then comes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import recording_of
from kvscope.monitor.base.errors import BadTime, NotKnown
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.kinds import Kind, Stage
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.contract.wire import Batch, Keyframe, Run, batch_of
from kvscope.monitor.history.history import History
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.questions import recent_past
from kvscope.monitor.questions.blocks import block_map
from kvscope.monitor.questions.engines import engine_view
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.request_details import request_views
from kvscope.monitor.questions.windows import firing_at
from tests.detectors.scenes import ENGINE, Watched
from tests.ledger.test_exact import FAULTS, random_lab


def random_run(seed: int, steps: int, *, losses: bool) -> tuple[Lab, list[Record]]:
    """A random engine and all that a reader of it got: from a keyframe or the start on, with gaps or without."""
    rng = random.Random(seed)
    lab = random_lab(rng, rng.choice(FAULTS))
    prefixes = [[rng.randrange(9) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    requests, keyframes = [], {}
    for n in range(steps):
        if rng.random() < 0.3:
            prompt = rng.choice(prefixes) + [rng.randrange(1000) for _ in range(rng.randint(1, 20))]
            requests.append(lab.arrive(prompt, max_tokens=rng.randint(1, 30), priority=rng.randint(0, 2)))
        if requests and rng.random() < 0.1:
            lab.abort(requests.pop(rng.randrange(len(requests))))
        lab.step(rng.choice((0.001, 0.01, 0.2)), stop_chance=0.03)
        if rng.random() < 0.2:
            lab.heartbeat()
        if rng.random() < 0.05 or n == steps // 10:
            keyframes[lab.frames[-1].sequence] = lab.keyframe()
    records: list[Record] = []
    late = rng.random() < 0.5
    for frame in lab.frames:
        if not late or records:
            records.append(frame)
        if frame.sequence in keyframes and (losses or not records):
            records += _lost(records, keyframes[frame.sequence], rng) if records else []
            records.append(keyframes[frame.sequence])
        elif losses and rng.random() < 0.01:
            del records[-rng.randint(1, 3) :]
    return lab, records


def _lost(records: list[Record], keyframe: Keyframe, rng: random.Random) -> list[Record]:
    """Now and then the last batches are lost for good, as the source says before the keyframe that follows them."""
    lost = [record.sequence for record in records[-3:] if isinstance(record, Batch)]
    if rng.random() < 0.5 or len(lost) < 3 or len(records) < 10:
        return []
    del records[-3:]
    events = [Run(Kind.LOST, 0, -1, [lost[0], keyframe.sequence, int(Stage.TRANSPORT)], [])]
    return [batch_of(keyframe.engine, keyframe.epoch, events, wall_ns=keyframe.wall_ns)]


def folded(records: Sequence[Record], observed_ns: int = 0) -> EngineLedger:
    ledger = EngineLedger(records[0].engine)
    for record in records:
        ledger.apply(record)
    if observed_ns:
        ledger.apply(batch_of(ledger.engine, ledger.epoch, [Run(Kind.OBSERVED, 0, -1, [observed_ns], [])]))
    return ledger


def until(records: Sequence[Record], at_ns: int) -> list[Record]:
    """What had been packed by then."""
    cut = next((i for i, record in enumerate(records) if getattr(record, "wall_ns", 0) > at_ns), len(records))
    return list(records[:cut])


def until_event(records: Sequence[Record], position: Position) -> list[Record]:
    """The same, to the event."""
    cut = next(
        i for i, record in enumerate(records) if isinstance(record, Batch) and record.sequence == position.sequence
    )
    batch = records[cut]
    assert isinstance(batch, Batch)
    events = list(batch.events())[: position.event + 1]
    part = batch_of(
        batch.engine,
        batch.epoch,
        events,
        sequence=batch.sequence,
        wall_ns=batch.wall_ns,
        mono_ns=batch.mono_ns,
        texts=batch.texts,
    )
    return [*records[:cut], part]


def assert_alike(watch: Pipeline, at: str, expected: EngineLedger, *, of_history: bool = False) -> None:
    engine = expected.engine
    shown = watch.block_map(engine, at)
    assert (shown.total, shown.states) == (expected.state.total, block_map(expected).states)
    (view,) = watch.engines(at)
    assert view.balance == expected.balance()
    requests, truth = watch.requests(engine, at), request_views(expected)
    if of_history:  # who had ended before the keyframe that it begins from, it does not know
        requests, truth = ([r for r in views if not r.ended] for views in (requests, truth))
    else:
        firing = firing_at(watch.lifecycle, engine, expected.now_ns)
        counted = msgspec.structs.replace(engine_view(expected, firing), at=view.at)
        assert view == msgspec.structs.replace(counted, last_seen_s_ago=view.last_seen_s_ago)
    assert requests == truth


def moments(records: Sequence[Record], count: int, rng: random.Random) -> list[int]:
    batches = [record for record in records if isinstance(record, Batch) and record.sequence >= 0]
    first, last = batches[0].wall_ns, batches[-1].wall_ns
    exact = [rng.choice(batches).wall_ns for _ in range(count // 2)]
    return [*exact, *(rng.randrange(first, last) for _ in range(count - count // 2))]


def check_moments(seed: int, steps: int, count: int, *, losses: bool) -> None:
    rng = random.Random(seed)
    _, records = random_run(seed, steps, losses=losses)
    watch = Pipeline()
    watch.feed(records)
    for at_ns in moments(records, count, rng):
        at_ns = at_ns // 1_000_000 * 1_000_000  # a time is given in milliseconds
        truth = folded(until(records, at_ns), at_ns)
        if truth.ready:
            assert_alike(watch, timestamp(at_ns) or "", truth)


def check_positions(seed: int, steps: int, count: int) -> None:
    rng = random.Random(seed)
    _, records = random_run(seed, steps, losses=False)
    watch = Pipeline()
    watch.feed(records)
    batches = [record for record in records if isinstance(record, Batch) and record.runs]
    for _ in range(count):
        batch = rng.choice(batches)
        position = Position(batch.epoch, batch.sequence, rng.randrange(len(batch.runs) // 20))
        truth = folded(until_event(records, position))
        engine = truth.engine
        assert watch.block_map(engine, str(position)).states == block_map(truth).states
        (view,) = watch.engines(str(position))
        assert view.balance == truth.balance()
        shown = {r.number: (r.state, r.reason, r.blocks) for r in watch.requests(engine, str(position))}
        assert shown == {r.number: (r.state, r.reason, r.blocks) for r in request_views(truth)}


@pytest.fixture(autouse=True)
def many_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short life has many states to begin from."""
    monkeypatch.setattr(recent_past, "MIN_BETWEEN", 4_000)
    monkeypatch.setattr(recent_past, "MAX_BETWEEN", 4_000)
    monkeypatch.setattr(recent_past, "MIN_ON_THE_WAY", 1_000)
    monkeypatch.setattr(recent_past, "MAX_ON_THE_WAY", 30_000)


# -------------------------------------------------------------------- truth


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("losses", [False, True], ids=["whole", "gaps"])
def test_what_was_at_a_time(seed: int, losses: bool) -> None:
    check_moments(seed, 120, 8, losses=losses)


@pytest.mark.parametrize("seed", range(10, 13))
def test_what_was_just_after_an_event(seed: int) -> None:
    check_positions(seed, 120, 8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 30))
def test_what_was_at_any_of_200_moments(seed: int) -> None:
    check_moments(seed, 600, 10, losses=seed % 2 == 0)
    check_positions(seed, 600, 10)


@pytest.mark.parametrize("seed", range(40, 42))
def test_what_memory_no_longer_has_history_gives(seed: int, tmp_path: Path) -> None:
    """A service that was started again: what it hears from now on is in memory, what was before on disk."""
    rng = random.Random(seed)
    lab, _ = random_run(seed, 120, losses=False)
    records: list[Record] = list(lab.frames)
    late = len(records) // 2
    keyframe = Lab.keyframe(lab)
    history = History(recording_of(lab, tmp_path))
    watch = Pipeline(history=history)
    watch.feed([msgspec.structs.replace(keyframe)])
    for at_ns in moments(records[:late], 6, rng):
        at_ns = at_ns // 1_000_000 * 1_000_000
        assert_alike(watch, timestamp(at_ns) or "", folded(until(records, at_ns), at_ns), of_history=True)
    first = records[0]
    assert isinstance(first, Batch)
    span = watch.history(lab.packer.engine)
    assert span.first == timestamp(first.wall_ns)
    assert span.in_memory_since == timestamp(keyframe.wall_ns)
    assert [life.epoch for life in span.epochs] == [lab.packer.epoch]
    at = timestamp(records[late].wall_ns) or ""  # type: ignore[union-attr]
    reported = [
        watch.request(lab.packer.engine, f"#{view.number}", at) for view in watch.requests(lab.packer.engine, at)
    ]
    assert reported
    assert all(detail.event_history_complete and detail.event_history[0].kind == "arrived" for detail in reported)


# -------------------------------------------------------------------- what cannot be asked for


def test_what_was_before_is_not_kept() -> None:
    scene = Watched()
    scene.lab.arrive(10)
    scene.run_until_idle()
    with pytest.raises(NotKnown, match=r"what was before \d\d:\d\d:\d\d is not kept: .* --data DIR"):
        scene.watch.block_map(ENGINE, "2001-02-03T04:05:06Z")
    with pytest.raises(NotKnown, match="position 7/7/7"):
        scene.watch.requests(ENGINE, "7/7/7")
    with pytest.raises(NotKnown, match="in no engine's stored stream"):
        scene.watch.engines("7/7/7")
    for wrong in ("noon", "25:00:00", "1/2/3/4", "7/"):
        with pytest.raises(BadTime, match="is not a time"):
            scene.watch.engines(wrong)


def test_what_is_to_come_is_as_it_is_now() -> None:
    scene = Watched()
    scene.lab.arrive(10, max_tokens=50)
    scene.steps(10)
    for later in ("2100-01-01T00:00:00Z", timestamp(scene.now_ns + 10**9) or ""):
        assert scene.watch.block_map(ENGINE, later) == scene.watch.block_map(ENGINE)
        assert scene.watch.requests(ENGINE, later) == scene.watch.requests(ENGINE)
        assert scene.watch.engines(later) == scene.watch.engines()


def test_a_life_before_the_last_can_be_asked_for() -> None:
    """An engine that was started again: its blocks as they were in the life before."""
    scene = Watched()
    request = scene.lab.arrive(10, max_tokens=50)
    scene.steps(10)
    before, at = scene.watch.block_map(ENGINE), timestamp(scene.now_ns) or ""
    again = Lab(engine=ENGINE)
    again.clock.sleep(60)  # type: ignore[attr-defined]
    again.packer.epoch = again.clock.time_ns()
    scene.watch.feed(
        msgspec.structs.replace(frame, epoch=again.packer.epoch, wall_ns=again.clock.time_ns())
        for frame in again.frames
    )
    assert scene.watch.requests(ENGINE) == []
    assert scene.watch.block_map(ENGINE, at) == before
    assert [view.id for view in scene.watch.requests(ENGINE, at)] == [request.id]
    assert scene.watch.engines(at)[0].restarts == 0


def test_a_silence_that_is_past_is_one() -> None:
    scene = Watched()
    scene.lab.arrive(10, max_tokens=50)
    scene.steps(3)
    scene.silence(8)
    at = timestamp(scene.now_ns) or ""
    scene.steps(3)
    assert [view.status for view in scene.watch.engines(at)] == ["silent"]
    assert [view.status for view in scene.watch.engines()] == ["degraded"]  # the stall was just found


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """States whose batches are gone are dropped with them, and what is left is answered."""
    monkeypatch.setattr("kvscope.monitor.ledger.engine_ledger.EngineLedger.max_recent_bytes", 60_000)
    scene = Watched(total=40, block_size=4)
    for _ in range(600):
        scene.lab.arrive(20, max_tokens=8)
        scene.steps(1)
    (kept,) = (past for past in scene.watch._past._recent.values())
    oldest = scene.ledger.recent[0]
    assert kept.since_ns >= oldest.wall_ns - 10**9
    assert len(kept._marks) < 60_000 // 1_000
    with pytest.raises(NotKnown, match="is not kept"):
        scene.watch.block_map(ENGINE, timestamp(oldest.wall_ns - 10**9) or "")
    newer = timestamp(kept.since_ns + 10**7) or ""
    assert scene.watch.block_map(ENGINE, newer).total == 40


def test_an_engine_that_names_no_pool_has_a_past_too() -> None:
    watch = Pipeline()
    for number in range(3):
        beat = [Run(Kind.STEP_LAUNCHED, 0, -1, [10**9 * (number + 1), 0, 0, 0], [])]
        watch.feed(
            [batch_of("bare", 1, beat, sequence=number, wall_ns=10**18 + 10**9 * number, mono_ns=10**9 * number)]
        )
    ledger = watch.fleet.engines["bare"]
    assert (ledger.state.total, len(ledger.state.requests)) == (0, 0)
    for at_ns in (10**18, 10**18 + 10**9):
        assert watch.requests("bare", timestamp(at_ns) or "") == []
        assert [view.engine for view in watch.engines(timestamp(at_ns) or "")] == ["bare"]


def test_states_on_the_way_weigh_what_they_keep_of_requests_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states kept of a past that is asked about again and again have a bound in bytes."""
    monkeypatch.setattr(recent_past, "MAX_ON_THE_WAY", 4 << 20)
    scene = Watched(total=40, block_size=4)
    for _ in range(800):
        scene.lab.arrive(8, max_tokens=2)
        scene.steps(3)
    assert len(scene.ledger.ended) > 700
    (kept,) = scene.watch._past._recent.values()
    first_ns, last_ns = kept.since_ns, scene.now_ns
    for part in range(1, 30):
        scene.watch.requests(ENGINE, timestamp(first_ns + (last_ns - first_ns) * part // 30) or "")
    assert kept._on_the_way
    records = sum(len(mark.of.ended) for mark in kept._on_the_way)
    assert records * 1_000 < 4 << 20


def test_an_engine_that_only_history_knows(tmp_path: Path) -> None:
    """A recording, or what a service kept of an engine that is gone: as it was last, and at any moment before."""
    lab, records = random_run(7, 60, losses=False)
    assert isinstance(records[0], Batch)
    lab_whole: list[Record] = list(lab.frames)
    engine = lab.packer.engine
    watch = Pipeline(history=History(recording_of(lab, tmp_path)))
    truth = folded(lab_whole)
    assert watch.engines() == []
    assert watch.block_map(engine).states == block_map(truth).states
    middle = lab.frames[len(lab.frames) // 2].wall_ns // 1_000_000 * 1_000_000
    assert_alike(watch, timestamp(middle) or "", folded(until(lab_whole, middle), middle), of_history=True)
    assert watch.findings(since=(timestamp(middle) or "")[11:19]) == []
    assert watch.points(engine, limit=10_000)[-1].at_ns == truth.points[-1].at_ns
    assert watch.retained_blocks(engine).is_complete
    with pytest.raises(NotKnown, match=f"no engine 'x' here; there are: {engine}"):
        watch.block_map("x")
    with pytest.raises(NotKnown, match="no engine has a stored state"):
        watch.engines(timestamp(truth.now_ns + 10**12) or "")
