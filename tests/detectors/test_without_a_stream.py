"""What metrics and logs of healthy engines were taken for, and what they are not taken for any more.

Each case is one in which an engine without an event stream was reported with *likely*. After each comes the incident
that it was taken for, which is still found.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
import pytest

from kvscope.lab.paper_engine import (
    Moment,
    PaperEngine,
    as_log,
    as_metrics,
    every,
    growing_agents,
    log_lines,
    long_generations,
)
from kvscope.monitor.contract.samples import Fact, ReportedEvent, Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log

SEEDS = range(50)
FINISHED_HELD = "leak.finished-held"
LOCKSTEP = "collapse.lockstep"
ENGINE_STALLED = "stuck.engine-stalled"
NEVER_FITS = "stuck.never-fits"
Records = Sequence[Sample | Fact | ReportedEvent]


def found(records: Records) -> list[FindingReport]:
    """All findings above information that there ever were."""
    watch = Pipeline()
    watch.feed(records)
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


def codes(records: Records) -> list[str]:
    return [finding.code for finding in found(records)]


def likely(records: Records) -> list[str]:
    return [finding.code for finding in found(records) if finding.verdict == "likely"]


def trends(seed: int, running: int, spread: int) -> list[Moment]:
    """Usage that climbs for six minutes with Running about the same, and a trickle of prompts."""
    rng = random.Random(seed)
    moments, prompts, generated = [], 0.0, 0.0
    for n in range(37):
        prompts += 10 * rng.uniform(20, 200)
        generated += 10 * rng.uniform(500, 700)
        now = max(1, running + rng.randint(-spread, spread))
        usage = 0.1 + 0.022 * n + rng.uniform(-0.004, 0.004)
        moments.append(Moment(10.0 * (n + 1), now, 0, 0, usage, prompts, generated, 300 * n, n))
    return moments


# -------------------------------------------------------------------- F1, F7: usage climbs, and nothing leaks


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 50), marks=pytest.mark.slow)])
@pytest.mark.parametrize("spread", [0, 2, 8, 16])
def test_long_generations_are_no_leak(spread: int, seeds: range) -> None:
    for seed in seeds:
        moments = trends(seed, 32, spread)
        assert codes(as_log(moments)) == codes(as_metrics(moments)) == [], seed


def test_long_generations_amid_short_prompts_are_no_leak() -> None:
    for seed in range(10):
        assert codes(as_log(every(long_generations(seed), 10))) == [], seed


def test_growing_agents_are_no_leak() -> None:
    for seed in range(10):
        moments = every(growing_agents(seed), 10)
        assert codes(as_log(moments)) == codes(as_metrics(moments)) == [], seed
    for seed in SEEDS:
        assert codes(as_log(trends(seed, 16, 3))) == [], seed


def leaky(seed: int, share: float, seconds: int = 200) -> list[Moment]:
    """A load that ends, of whose requests so many keep their blocks."""
    engine = PaperEngine(seed, capacity=120_000)

    def forget(prompt: int, output: int) -> None:
        if engine.rng.random() < share:
            engine.held.append((float("inf"), prompt + output))

    def arrive() -> None:
        if engine.t < 150 and engine.rng.random() < 0.5:
            prompt, output = engine.rng.randint(500, 2500), engine.rng.randint(50, 600)
            engine.ask(prompt, output, lambda: forget(prompt, output))

    return engine.run(seconds, arrive).moments


def test_a_leak_of_most_requests_is_found_in_a_log_when_the_load_drains() -> None:
    seen = [set(likely(as_log(every(leaky(seed, 1.0), 10)))) for seed in range(10)]
    assert seen.count({FINISHED_HELD}) >= 8
    assert all(codes <= {FINISHED_HELD} for codes in seen)


def test_a_leak_is_found_once_idle_for_longer_than_a_lease() -> None:
    for seed in range(5):
        moments = leaky(seed, 0.3, seconds=800)
        for seconds in (5, 15, 30, 60):
            assert likely(as_metrics(every(moments, seconds))) == [FINISHED_HELD], (seed, seconds)


# -------------------------------------------------------------------- F3, F6: blocks kept on purpose


def idle_with(usage: float, seconds: int, *, waiting: int = 0, deferred: int = 0) -> list[Moment]:
    busy = Moment(1.0, 2, 0, 0, usage, 5000.0, 50.0, 50, 3)
    idle = Moment(2.0, 0, waiting, deferred, usage, 5000.0, 50.0, 51, 5)
    return [busy, *(idle._replace(t=2.0 + n) for n in range(seconds))]


@pytest.mark.parametrize("seconds", [15, 60, 300])
def test_blocks_held_for_a_consumer_are_no_leak(seconds: int) -> None:
    """The prefill side of a pair: what a consumer has not fetched yet."""
    for records in (as_metrics(idle_with(0.3, seconds)), as_log(idle_with(0.3, seconds))):
        assert likely(records) == []


def test_blocks_held_longer_than_any_lease_are_a_leak() -> None:
    assert likely(as_metrics(idle_with(0.3, 500))) == [FINISHED_HELD]


def named(moments: list[Moment], arguments: str) -> Records:
    """The same log, with a line of the arguments that the engine was started with."""
    start = f"INFO 11-20 11:59:00 [utils.py:1] non-default args: {{{arguments}}}"
    later = "INFO 11-20 12:05:00 [launcher.py:1] GET /health"
    return list(Log("paper.log", datetime(2026, 11, 21, tzinfo=UTC)).records([start, *log_lines(moments), later]))


PRODUCER = "'model': 'm', 'kv_transfer_config': KVTransferConfig(kv_connector='NixlConnector', kv_role='kv_producer')"


def test_without_a_connector_nothing_may_hold_them() -> None:
    moments = [*idle_with(0.3, 40)]
    moments[-1] = moments[-1]._replace(generation_tokens=51.0)  # the line by which an engine says that it is idle
    assert likely(named(moments, "'model': 'm', 'max_model_len': 4096")) == [FINISHED_HELD]
    assert likely(named(moments, PRODUCER)) == []


@pytest.mark.parametrize("hidden", [(), ("deferred",)])
def test_a_decode_side_that_waits_for_kv_is_no_leak(hidden: tuple[str, ...]) -> None:
    """Before vLLM 0.20 the reason for which requests wait was not exposed."""
    moments = idle_with(0.4, 60, waiting=12, deferred=12)
    assert likely(as_metrics(moments, *hidden)) == []


def test_requests_starved_by_blocks_that_nobody_runs_with_are_a_leak() -> None:
    assert likely(as_metrics(idle_with(0.97, 70, waiting=8))) == [FINISHED_HELD]
    assert likely(as_metrics(idle_with(0.97, 20, waiting=8))) == []


def test_two_scrapes_a_minute_apart_show_starved_requests() -> None:
    first, *_, last = as_metrics([moment for moment in idle_with(0.97, 70, waiting=8) if not moment.running])
    assert likely([first, last]) == [FINISHED_HELD]


def stands_full(seconds: int, deferred: int = 3) -> list[Moment]:
    """Nothing runs or moves in a full pool, 110 requests wait, and so many of them for something other than room."""
    return idle_with(0.99, seconds, waiting=110, deferred=deferred)


@pytest.mark.parametrize("deferred", [3, 110])
def test_a_full_pool_behind_fetches_that_do_not_end_is_a_fetch_or_a_leak(deferred: int) -> None:
    for seconds in (1, 5, 15, 30):
        (finding,) = found(as_metrics(every(stands_full(150, deferred), seconds, 1)))
        assert (finding.code, finding.verdict) == (FINISHED_HELD, "cannot-tell")
        assert "stuck.remote-load" in finding.explanation
        assert "a leak" in finding.explanation
        assert "--kv-transfer-config" in finding.missing
        assert not any("restart" in step.lower() for step in finding.do_now)
    assert found(as_metrics(stands_full(40, deferred))) == []


def test_requests_that_come_to_such_a_pool_show_no_progress() -> None:
    moments = [moment._replace(waiting=20 + n, deferred=3 + n // 10) for n, moment in enumerate(stands_full(150))]
    assert codes(as_metrics([moments[0]._replace(waiting=0, deferred=0), *moments[1:]])) == [FINISHED_HELD]


@pytest.mark.parametrize("field", ["deferred", "steps", "finished", "generation_tokens", "prompt_tokens"])
@pytest.mark.parametrize("every_s", [1, 15, 30])
def test_a_decode_side_whose_fetches_end_is_silent(field: str, every_s: int) -> None:
    """What was fetched runs for less than the time between two scrapes, so that nothing seems to run."""
    moments = [
        moment._replace(**{field: getattr(moment, field) + (-1 if field == "deferred" else 1) * (n // 40)})
        for n, moment in enumerate(stands_full(400, 50))
    ]
    assert codes(as_metrics(every(moments, every_s, 1))) == []


def test_an_engine_that_was_put_to_sleep_with_a_full_pool_is_silent() -> None:
    asleep = [msgspec.structs.replace(sample, awake=False) for sample in as_metrics(stands_full(150))]
    assert codes(asleep) == []


def test_a_consumer_with_a_full_pool_may_hold_it_for_its_queue() -> None:
    consumer = Fact("paper@x:1/0", "paper.log:1", "kv_role", "kv_consumer")
    for deferred in (0, 3):
        samples = as_metrics(stands_full(150, deferred))
        (finding,) = found([msgspec.structs.replace(consumer, engine=samples[0].engine), *samples])
        assert (finding.code, finding.verdict) == (FINISHED_HELD, "cannot-tell")


# -------------------------------------------------------------------- F2: clients that give up together


def retried(finished: int, aborted: int) -> list[Moment]:
    """40 clients time out together and ask again; or were all answered."""
    full = [Moment(float(n), 40, 0, 0, 0.9, 40_000.0, 800.0 * n, 20 * n, 0) for n in range(1, 30)]
    fell = Moment(30.0, 0, 40, 0, 0.0, 40_000.0, 24_000.0, 600, finished, aborted)
    rest = [
        fell._replace(t=30.0 + n, running=2 * n, waiting=40 - 2 * n, usage=0.045 * n, prompt_tokens=40_000.0 + 2000 * n)
        for n in range(1, 15)
    ]
    return [*full, fell, *rest]


def test_clients_that_time_out_together_are_not_in_lock_step() -> None:
    assert LOCKSTEP not in codes(as_metrics(retried(0, 40)))
    assert LOCKSTEP not in codes(as_metrics(retried(0, 0)))  # vLLM counts some clients that leave nowhere
    assert LOCKSTEP not in likely(as_log(retried(0, 40)))


def test_requests_that_end_together_are() -> None:
    assert likely(as_metrics(retried(40, 0))) == [LOCKSTEP]
    (finding,) = found(as_log(retried(40, 0)))
    assert (finding.code, finding.verdict) == (LOCKSTEP, "cannot-tell")
    assert "time out" in finding.explanation


def test_a_wave_that_waits_for_something_other_than_room_does_not_queue() -> None:
    """Its grammars compile, or its KV is fetched: no prompt of another request holds it back."""
    fetched = [moment._replace(deferred=moment.waiting) for moment in retried(40, 0)]
    assert LOCKSTEP not in codes(as_metrics(fetched))


@pytest.mark.parametrize(("admitted", "queues"), [(19, True), (20, False)])
def test_a_wave_of_which_most_runs_at_once_does_not_queue(admitted: int, queues: bool) -> None:
    """40 end together and as many come: if half of them run in the next second, no line forms for room."""
    moments = retried(40, 0)
    fell = moments[29]
    moments[29:] = [
        fell._replace(waiting=0),
        fell._replace(t=31.0, running=admitted, waiting=20, usage=0.4, prompt_tokens=50_000.0),
        *(fell._replace(t=31.0 + n, running=40, waiting=0, usage=0.9, prompt_tokens=80_000.0) for n in range(1, 15)),
    ]
    assert (LOCKSTEP in codes(as_metrics(moments))) == queues


def ends(running: int, life_s: float, fall_s: int) -> list[Moment]:
    """Requests come and go for two minutes; those that run then end within `fall_s`, and as many others wait."""
    steady = [
        Moment(float(t), running, 0, 0, 0.8, 1000.0 * t, 90.0 * t, 30 * t, int(t * running / life_s))
        for t in range(1, 121)
    ]
    last = steady[-1]
    ended = [min(running, math.ceil(running * second / fall_s)) for second in range(1, fall_s + 1)]
    fall = [
        last._replace(
            t=120.0 + n, running=running - gone, usage=0.8 * (1 - gone / running), finished=last.finished + gone
        )
        for n, gone in enumerate(ended, 1)
    ]
    queued = fall[-1]._replace(running=1, waiting=running, usage=0.2)
    return [
        *steady,
        *fall,
        *(
            queued._replace(t=queued.t + n, prompt_tokens=queued.prompt_tokens + 500 * n, steps=queued.steps + n)
            for n in range(1, 16)
        ),
    ]


@pytest.mark.parametrize("first", range(5))
def test_few_short_requests_that_end_between_two_scrapes_are_not_in_lock_step(first: int) -> None:
    """Four that run for half a minute each all end within ten seconds now and then."""
    assert LOCKSTEP not in codes(as_metrics(every(ends(4, 30.0, 8), 5, first)))


def test_few_requests_that_ran_for_long_and_end_together_are() -> None:
    assert likely(as_metrics(ends(4, 600.0, 1))) == [LOCKSTEP]
    assert likely(as_metrics(every(ends(4, 600.0, 4), 5))) == [LOCKSTEP]
    assert LOCKSTEP not in codes(as_metrics(ends(3, 600.0, 1)))


# -------------------------------------------------------------------- F4, F5: one long step, and pauses


def steps_of(seconds: float, watched_s: int, every_s: int = 1, first_s: float = 0.0) -> list[Moment]:
    return [
        Moment(float(t), 4, 1, 0, 0.5, 1000.0, 4.0 * int((t + first_s) / seconds), int((t + first_s) / seconds), 0)
        for t in range(1, watched_s, every_s)
    ]


@pytest.mark.parametrize("watched_s", [12, 40, 200])
def test_an_engine_with_slow_steps_is_not_stalled(watched_s: int) -> None:
    for first_s in range(0, 30, 4):
        assert codes(as_metrics(steps_of(30.0, watched_s, first_s=first_s))) == []


@pytest.mark.parametrize("every_s", [5, 15, 30, 60])
def test_one_long_step_between_two_scrapes_is_no_stall(every_s: int) -> None:
    """Fast steps, and one of 20 s: a prompt of a million tokens."""
    for began_s in range(100, 160, 7):
        moments = [
            Moment(float(t), 4, 0, 0, 0.5, 1000.0, 4.0 * n, n, 0)
            for t in range(1, 400, every_s)
            for n in [50 * (t if t < began_s else max(began_s, t - 20))]
        ]
        assert codes(as_metrics(moments)) == []


def paused(seconds: int, running: int, usage: float) -> list[Moment]:
    before = [Moment(float(t), max(running, 1), 0, 0, 0.3, 100.0 * t, 90.0 * t, 50 * t, t) for t in range(1, 60)]
    still = before[-1]._replace(running=running, waiting=2, usage=usage)
    return [*before, *(still._replace(t=60.0 + n) for n in range(seconds))]


@pytest.mark.parametrize(("running", "usage"), [(0, 0.0), (6, 0.3)])
def test_a_pause_for_new_weights_is_not_called_a_stall(running: int, usage: float) -> None:
    for seconds in (15, 20):
        for records in (as_metrics(paused(seconds, running, usage)), as_log(paused(seconds, running, usage))):
            assert likely(records) == []


def test_an_engine_that_does_not_move_for_minutes_is_stalled() -> None:
    assert likely(as_metrics(paused(90, 6, 0.3))) == [ENGINE_STALLED]
    assert likely(as_metrics(every(paused(400, 6, 0.3), 15))) == [ENGINE_STALLED]


def test_a_queue_before_an_empty_pool_is_a_hypothesis_that_names_the_pause() -> None:
    (finding,) = found(as_metrics(paused(90, 0, 0.0)))
    assert (finding.code, finding.verdict) == (NEVER_FITS, "cannot-tell")
    assert "paused" in finding.explanation
    assert "needs more blocks than the pool" in finding.explanation


# -------------------------------------------------------------------- preemptions by the engine's own counter


def preempting(per_minute: int, finished_per_minute: int, usage: float = 0.97, minutes: int = 5) -> list[Moment]:
    return [
        Moment(
            float(second),
            20,
            6,
            0,
            usage,
            100.0 * second,
            600.0 * second,
            30 * second,
            finished_per_minute * second // 60,
            0,
            per_minute * second // 60,
        )
        for second in range(1, 60 * minutes)
    ]


@pytest.mark.parametrize("seconds", [1, 5, 15, 30, 60])
def test_preemptions_without_end_are_found(seconds: int) -> None:
    """Where they come to more than one for each request, the size of the pool is an effect."""
    assert likely(as_metrics(every(preempting(60, 20), seconds))) == ["thrash.preemption"]
    assert likely(as_metrics(every(preempting(30, 60), seconds))) == ["sizing.kv-too-small"]


def test_a_few_preemptions_of_a_full_pool_are_none() -> None:
    assert not codes(as_metrics(preempting(6, 60)))
    assert not codes(as_metrics(preempting(60, 20, usage=0.5)))  # by priority, or a reset: not for want of blocks
    assert not codes(as_metrics(preempting(60, 20, minutes=2)))
    burst = [moment._replace(preemptions=min(moment.preemptions, 40)) for moment in preempting(60, 20)]
    assert not codes(as_metrics(burst[100:]))


def test_preemptions_of_many_long_requests_are_counted_for_each_that_runs() -> None:
    """None of them ends in the window, and hardly any has been preempted."""
    few = [moment._replace(running=100) for moment in preempting(6, 0)]
    assert not codes(as_metrics(few))
    assert likely(as_metrics([moment._replace(running=6) for moment in few])) == ["thrash.preemption"]


def test_preemptions_are_counted_where_aborted_requests_are_not_exposed() -> None:
    moments = every(preempting(60, 20), 15)
    assert likely(as_metrics(moments, "aborted")) == ["thrash.preemption"]


@pytest.mark.parametrize(("preemptions", "counted"), [(9, False), (10, True)])
def test_ten_preemptions_within_three_minutes_are_enough_to_count(preemptions: int, counted: bool) -> None:
    """Six requests run meanwhile, and none ends."""
    moments = [
        moment._replace(running=6, finished=0, preemptions=preemptions * n // 12)
        for n, moment in enumerate(every(preempting(0, 0), 15)[:13])
    ]
    assert bool(codes(as_metrics(moments))) is counted
