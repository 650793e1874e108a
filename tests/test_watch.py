"""The road in one process: frames in, answers out, whatever the engine says."""

from __future__ import annotations

import contextlib
import random
import threading
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.contract.kinds import SCHEMA, Cause, Kind, Status
from kvscope.monitor.contract.wire import Batch, Keyframe, NotAFrame, Run, batch_of, decode, encode
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.schema import BLOCK_STATES
from kvscope.monitor.sources.log_file import read_log
from tests.detectors.scenes import ENGINE, Watched, finished_held, never_fits, stalled, unaccounted

DATA = Path(__file__).parent / "data"


def ask_everything(watch: Pipeline) -> None:
    for view in watch.engines():
        for finding in watch.findings():
            assert msgspec.json.decode(msgspec.json.encode(finding), type=type(finding)) == finding
        watch.findings("pending")
        watch.points(view.engine)
        map_of = watch.block_map(view.engine)
        for request in watch.requests(view.engine):
            watch.request(view.engine, f"#{request.number}")
        for block in range(min(map_of.total, 40)):
            detail = watch.block(view.engine, block)
            assert detail.ownership_chains
            assert BLOCK_STATES.index(detail.state) == map_of.states[block]
        if view.signal == "stream":
            ask_about_the_past(watch, view.engine)


def ask_about_the_past(watch: Pipeline, engine: str) -> None:
    events = watch.events(engine, limit=50)
    for question in (watch.retained_blocks, watch.prefix_cache, watch.explain, watch.usage_drop, watch.history):
        answer = question(engine)  # type: ignore[operator]
        assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer
    for event in events[::20]:
        for at in (event.position, event.at or ""):
            try:
                shown = watch.block_map(engine, at)
            except NotKnown:  # a time that no clock has shown
                assert at == event.at
                continue
            assert len(shown.states) == shown.total
            for request in watch.requests(engine, at)[:3]:
                watch.request(engine, f"#{request.number}", at)


# -------------------------------------------------------------------- nothing breaks it


def garbage(rng: random.Random) -> Run:
    """An event of a known or unknown kind, with as many values as it should have or not, some of them absurd."""
    kind = rng.choice((*Kind, 200))
    wanted = len(SCHEMA[kind].args) if kind in SCHEMA else 3
    values = (0, 1, 2, 3, 5, 9, -1, 40, 10**6, 2**62, -(2**63))
    args = [rng.choice(values) for _ in range(rng.choice((wanted, wanted, wanted + 2, 0)))]
    ids = [rng.choice((1, 2, 3, 7, 31, -5, 10**6)) for _ in range(rng.choice((0, 1, 1, 3)))]
    return Run(kind, 0, rng.choice((-1, 1, 2, 3)), args, ids)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
def test_nothing_that_an_engine_can_say_breaks_it(seed: int) -> None:
    """A true beginning, then nonsense: it never raises, and answers every question all the while."""
    rng = random.Random(seed)
    lab = Lab(total=32, engine=ENGINE, connector_share=0.5, seed=seed)
    for _ in range(20):
        lab.arrive(rng.randint(1, 30))
        lab.step()
    watch = Pipeline()
    watch.feed(lab.frames)
    sequence = lab.frames[-1].sequence
    for n in range(60):
        events = [garbage(rng) for _ in range(rng.randint(1, 5))]
        batch = batch_of(
            ENGINE,
            lab.packer.epoch,
            events,
            sequence=sequence + 1 + n,
            wall_ns=lab.clock.time_ns() + n * 400_000_000,
            mono_ns=lab.clock.monotonic_ns() + n * 400_000_000,
            texts={rng.choice((-1, 1, 2)): rng.choice(("", "{", "r-x", '{"engine": 7}', "null"))} if n % 7 == 0 else {},
        )
        with contextlib.suppress(NotAFrame):  # refused at the edge, for an impossible pool say
            frame = decode(encode(batch))
            assert isinstance(frame, Batch)
            watch.feed([frame])
        if n % 10 == 0:
            watch.settle()
            ask_everything(watch)
    watch.settle()
    ask_everything(watch)


@pytest.mark.parametrize("start", range(0, 60, 7))
def test_who_comes_in_anywhere_has_answers(start: int) -> None:
    """From a keyframe and what follows it; without one there is an engine of which nothing is known yet."""
    scene = finished_held()
    scene.live(2, every=0.05)
    keyless = Pipeline()
    keyless.feed(scene.lab.frames[start + 1 :])
    keyless.settle()
    (view,) = keyless.engines()
    assert view.signal == "metrics"
    assert view.balance is None
    assert keyless.findings() == []
    lab = Lab(engine=ENGINE, total=40, connector_share=0.5)
    keyframe: Keyframe | None = None
    for n in range(60):
        if n == start:
            keyframe = lab.keyframe()
        lab.arrive(10, max_tokens=5)
        lab.step()
    assert keyframe is not None
    late, early = Pipeline(), Pipeline()
    late.feed([keyframe, *(f for f in lab.frames if f.sequence > keyframe.sequence)])
    early.feed(lab.frames)
    ask_everything(late)
    assert late.block_map(ENGINE) == early.block_map(ENGINE)
    assert late.engines()[0].balance == early.engines()[0].balance


@pytest.mark.slow
def test_asked_by_others_while_it_is_fed() -> None:
    scene = finished_held()
    scene.live(30)
    watch = Pipeline()
    watch.feed(scene.lab.frames[:1])
    stop = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        """Between two questions the state may move on; what is compared with each other is asked under the lock."""
        try:
            while not stop.is_set():
                with watch.locked():
                    ask_everything(watch)
                watch.points(ENGINE)
                watch.findings()
                watch.requests(ENGINE)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for frame in scene.lab.frames[1:]:
        watch.feed([frame])
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed
    unasked = Pipeline()
    unasked.feed(scene.lab.frames)
    assert watch.findings() == unasked.findings()
    assert watch.engines() == unasked.engines()


# -------------------------------------------------------------------- what is answered


def test_the_block_map_is_the_pool() -> None:
    scene = unaccounted()
    for n in range(3):
        scene.lab.arrive(20 + n, max_tokens=3)
    scene.steps(30)
    pool, manager = scene.lab.pool, scene.lab.manager
    living = {b for n in manager.tables for b in scene.lab.blocks_of(n)}
    shown = scene.watch.block_map(ENGINE)
    assert len(shown.states) == shown.total == pool.total
    for block in range(1, pool.total):
        expected = (
            "running"
            if block in living
            else "UNACCOUNTED"
            if pool.refs[block]
            else "cached-idle"
            if pool.digests[block] is not None
            else "free"
        )
        assert BLOCK_STATES[shown.states[block]] == expected
    assert BLOCK_STATES[shown.states[0]] == "reserved"


def test_the_block_map_and_the_balance_count_alike() -> None:
    for scene in (finished_held("leak.finished-held:every=2"), unaccounted(), never_fits()[0], stalled()):
        balance = scene.ledger.balance()
        states = scene.watch.block_map(ENGINE).states
        counts = dict(zip(BLOCK_STATES, (states.count(i) for i in range(len(BLOCK_STATES))), strict=True))
        assert counts == {
            "free": balance.free,
            "cached-idle": balance.cached_idle,
            "running": balance.running,
            "waiting": balance.waiting,
            "finished": balance.finished,
            "reserved": balance.reserved,
            "UNACCOUNTED": balance.unaccounted,
        }


def test_every_request_is_in_one_state_for_one_reason() -> None:
    scene, _ = never_fits()
    running = scene.lab.arrive(8, name="behind")
    scene.steps(3)
    views = {view.id: view for view in scene.watch.requests(ENGINE)}
    assert (views["the-big-one"].state, views["the-big-one"].reason) == ("WAITING", "KV_BLOCKS")
    assert (views[running.id].state, views[running.id].reason) == ("WAITING", "BEHIND_HEAD")
    (engine,) = scene.watch.engines()
    assert engine.waiting_by_reason == {"KV_BLOCKS": 1, "BEHIND_HEAD": 3}
    assert engine.waiting == len(scene.lab.scheduler.waiting) == 4
    assert engine.running == 0


def test_a_finished_request_that_holds_blocks_says_why() -> None:
    deferred = finished_held()
    assert {v.reason for v in deferred.watch.requests(ENGINE) if v.blocks} == {"FREE_DEFERRED"}
    left = unaccounted()
    (view,) = [v for v in left.watch.requests(ENGINE) if v.id == "r-1"]
    assert (view.state, view.reason, view.ended) == ("FINISHED_ABORTED", "UNACCOUNTED", False)


def test_a_request_that_ended_is_still_known() -> None:
    scene = Watched()
    request = scene.lab.arrive(10, max_tokens=4)
    scene.run_until_idle()
    detail = scene.watch.request(ENGINE, request.id)
    assert detail == scene.watch.request(ENGINE, f"#{request.number}")
    assert detail.request.ended
    assert (detail.request.state, detail.request.output_tokens) == (Status.FINISHED_LENGTH_CAPPED.name, 4)
    assert detail.event_history_complete
    assert detail.blocks == []


def test_what_is_not_known_says_what_there_is() -> None:
    scene = Watched()
    with pytest.raises(NotKnown, match=r"no engine 'x' here; there are: lab@"):
        scene.watch.block_map("x")
    with pytest.raises(NotKnown, match="there are: none yet"):
        Pipeline().points("x")
    with pytest.raises(NotKnown, match="no request 'r-7'"):
        scene.watch.request(ENGINE, "r-7")
    with pytest.raises(NotKnown, match=f"blocks 0 to {scene.lab.pool.total - 1}"):
        scene.watch.block(ENGINE, scene.lab.pool.total)


def test_the_recent_past_is_thinned_evenly_and_ends_now() -> None:
    scene = Watched()
    for _ in range(30):
        scene.lab.arrive(10, max_tokens=10)
    scene.live(60, every=0.1)
    every = scene.watch.points(ENGINE, limit=10_000)
    assert len(every) > 500
    for most in (1, 2, 7, 100, len(every), len(every) + 1):
        some = scene.watch.points(ENGINE, limit=most)
        assert 0 < len(some) <= most
        assert some[-1] == every[-1]
        assert len({b.at_ns - a.at_ns for a, b in pairwise(some)}) <= 3
    last_10_s = scene.watch.points(ENGINE, seconds=10, limit=10_000)
    assert last_10_s == [p for p in every if p.at_ns >= scene.ledger.now_ns - 10e9]


@pytest.mark.parametrize(
    ("then", "status"), [("work", "serving"), ("rest", "idle"), ("silence", "silent"), ("stop", "stopped")]
)
def test_what_the_engine_is_doing(then: str, status: str) -> None:
    scene = Watched()
    scene.lab.arrive(10, max_tokens=10)
    scene.steps(3)
    if then == "rest":
        scene.run_until_idle()
        scene.beat(60)
    elif then == "silence":
        scene.silence(5)
    elif then == "stop":
        scene.lab.log.stopped()
        scene.lab.flush()
        scene.look()
        scene.silence(5)
    (view,) = scene.watch.engines()
    assert view.status == status
    assert view.last_seen_s_ago == (5.0 if then in ("silence", "stop") else 0.0)


def test_a_restarted_engine_begins_anew() -> None:
    """What was wrong in its last life is resolved, not wrong for ever."""
    scene = finished_held()
    scene.live(15)
    assert scene.only("leak.finished-held")
    again = Lab(engine=ENGINE)
    assert isinstance(scene.lab.clock, type(again.clock))
    again.clock.sleep(60)  # type: ignore[attr-defined]
    again.packer.epoch = again.clock.time_ns()
    for frame in again.frames:
        scene.watch.feed([msgspec.structs.replace(frame, epoch=again.packer.epoch, wall_ns=again.clock.time_ns())])
    again.arrive(10)
    for _ in range(10):
        scene.watch.feed(again.frames[-1:])
        again.step(1.0)
    (view,) = scene.watch.engines()
    assert view.restarts == 1
    assert view.balance is not None
    assert view.balance.finished == 0
    assert not scene.firing("leak.finished-held")
    assert [f.state for f in scene.watch.findings("resolved") if f.code == "leak.finished-held"] == ["resolved"]


def test_faults_that_are_on_are_said_on_every_answer_about_the_engine() -> None:
    (view,) = finished_held("leak.finished-held:every=3").watch.engines()
    assert view.faults == ["leak.finished-held:every=3"]
    assert "faults" not in view.configuration


def test_transitions_and_ends_are_told_once() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(15)
    assert "leak.finished-held" in {t.finding.judgement.code for t in scene.watch.take_transitions()}
    assert scene.watch.take_transitions() == []
    affected = scene.lab.faults.on["leak.finished-held"].affected
    ended = [ended.request.id for ended in scene.watch.take_ended()]
    assert sorted(ended) == [f"r-{n}" for n in range(1, 7)]  # those whose blocks never came back too
    assert len(affected) == 3
    assert scene.watch.take_ended() == []


def test_what_a_log_cannot_tell_is_none_and_never_0() -> None:
    watch = Pipeline()
    watch.feed(read_log(DATA / "never-freed.log.gz")[1])
    watch.settle()
    (view,) = watch.engines()
    assert (view.signal, view.engine, view.version) == ("metrics", "tiny@127.0.0.1:8100/0", "0.32.0")
    assert (view.balance, view.step, view.preemptions) == (None, None, None)
    assert (view.running, view.usage) == (0, 0.998)
    assert watch.points(view.engine)[-1].free is None
    for asks in (watch.requests, watch.block_map):
        with pytest.raises(NotKnown, match="needs the event stream"):
            asks(view.engine)


def test_waits_are_told_by_cause() -> None:
    scene = Watched(max_num_seqs=1)
    first = scene.lab.arrive(10, max_tokens=20)
    second = scene.lab.arrive(10, max_tokens=2)
    scene.run_until_idle()
    waited = scene.watch.request(ENGINE, second.id).waited_s
    assert set(waited) <= {Cause.NEW.name, Cause.MAX_NUM_SEQS.name}
    ended = {r.id: r for r in scene.ledger.ended}
    arrived_to_admitted = ended[second.id].admitted_ns - ended[second.id].arrived_ns
    assert sum(waited.values()) == pytest.approx(arrived_to_admitted / 1e9, abs=0.001)
    assert ended[second.id].admitted_ns >= ended[first.id].finished_ns
