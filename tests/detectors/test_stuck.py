"""stuck.never-fits and stuck.engine-stalled, and what only looks like them."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Limit, Preempt, Release, Status
from tests.detectors.scenes import Spoken, Watched, never_fits, stalled, value

NEVER_FITS = "stuck.never-fits"
ENGINE_STALLED = "stuck.engine-stalled"


# -------------------------------------------------------------------- stuck.never-fits


def test_a_request_larger_than_the_pool() -> None:
    scene, big = never_fits()
    scene.live(3)
    finding = scene.only(NEVER_FITS)
    assert (finding.severity, finding.verdict) == ("error", "confirmed")
    assert finding.culprits.requests == [big.id]
    assert value(finding, "blocks_needed") == scene.lab.manager.blocks_for(big.num_prompt_tokens)
    assert value(finding, "blocks_usable") == scene.lab.pool.usable
    assert value(finding, "waiting_behind") == 2
    assert "small-1 and small-2" in finding.explanation
    assert f"--max-model-len {scene.lab.pool.usable * scene.lab.manager.block_size}" in finding.change[0]


@pytest.mark.parametrize(("seconds", "found"), [(0.75, False), (1.25, True)])
def test_a_request_larger_than_the_pool_is_found_after_a_second(seconds: float, found: bool) -> None:
    scene = Spoken(total=33)
    scene.log.arrived(1, "r-1", 200, 8, 0, 50, 52)
    scene.say()
    scene.wait(seconds)
    assert bool(scene.firing(NEVER_FITS)) is found


def test_a_request_larger_than_the_pool_that_stands_alone_holds_none_back() -> None:
    """The scheduler has passed it over, and nobody came after it."""
    scene = Spoken(total=33)
    scene.log.arrived(1, "r-1", 200, 8, 0, 50, 52)
    scene.log.not_scheduled(1, Cause.KV_BLOCKS, 1)
    scene.say()
    scene.wait(2)
    assert "behind it" not in scene.only(NEVER_FITS).explanation


def test_a_request_that_would_fit_without_leaked_blocks_never_fits() -> None:
    """Twenty of 32 blocks belong to a request that was aborted, and another needs sixteen."""
    scene = Spoken(total=33)
    scene.arrive(1, list(range(1, 21)))
    scene.say()
    scene.log.finished(1, Status.FINISHED_ABORTED)
    scene.log.arrived(2, "r-2", 64, 8, 0, 16, 18)
    scene.log.queued(2, Cause.NEW, at_front=False)
    scene.log.allocation_failed(2, 16, 12)
    scene.log.not_scheduled(2, Cause.KV_BLOCKS, 1)
    scene.say()
    for _ in range(20):
        scene.wait(1)
    assert [finding.code for finding in scene.firing()] == ["leak.unaccounted"]
    (finding,) = scene.watch.findings("suppressed")  # an effect of the leak
    assert (finding.code, finding.culprits.requests) == (NEVER_FITS, ["r-2"])
    assert finding.culprits.blocks == list(range(1, 21))
    assert (value(finding, "blocks_leaked"), value(finding, "blocks_free")) == (20, 12)


@pytest.mark.parametrize("is_freed", [True, False])
def test_blocks_that_were_used_for_long_are_not_leaked_at_once(is_freed: bool) -> None:
    """Their request ends after a minute, and its free is reported in the batch after that, or never."""
    scene = Spoken(total=33)
    scene.arrive(1, list(range(1, 21)))
    scene.log.arrived(2, "r-2", 64, 8, 0, 16, 18)
    scene.log.queued(2, Cause.NEW, at_front=False)
    scene.log.allocation_failed(2, 16, 12)
    scene.log.not_scheduled(2, Cause.KV_BLOCKS, 1)
    scene.say()
    for _ in range(60):
        scene.wait(1)
    scene.log.finished(1, Status.FINISHED_ABORTED)
    for _ in range(15):
        scene.wait(0.1)
    if is_freed:
        scene.log.released(1, list(range(1, 21)), Release.FINISHED)
    for _ in range(30):
        scene.wait(0.1)
    fired = scene.watch.findings("firing") + scene.watch.findings("resolved")
    grave = [finding.code for finding in fired if finding.severity != "info"]
    assert grave == ([] if is_freed else ["leak.unaccounted"])


def test_a_preempted_request_that_has_outgrown_the_pool_needs_more_blocks_since_then() -> None:
    scene = Spoken(total=33)
    scene.arrive(1, list(range(1, 33)))
    scene.say()
    scene.log.progressed([1], [128], [5])
    scene.log.preempted(1, Preempt.KV_BLOCKS, 0, 32, 128)
    scene.log.released(1, list(range(1, 33)), Release.PREEMPTED)
    scene.wait(1)
    scene.wait(2)
    finding = scene.only(NEVER_FITS)
    assert [one.position for one in finding.evidence if one.name == "blocks_needed"] == [finding.position]


def test_a_thousand_requests_larger_than_the_pool_are_one_finding() -> None:
    scene = Spoken(total=33)
    for number in range(1000):
        scene.log.arrived(number, f"r-{number}", 200, 8, 0, 50, 52)
    scene.say()
    scene.wait(2)
    finding = scene.only(NEVER_FITS)
    assert finding.culprits.requests == [f"r-{number}" for number in range(1000)]
    assert "The same holds for r-1, r-2, r-3 and 996 more." in finding.explanation


def test_what_is_advised_helps() -> None:
    """Abort the culprit: those behind it run at once, and it is over."""
    scene, big = never_fits()
    scene.live(3)
    fired = scene.only(NEVER_FITS)
    scene.lab.abort(big)
    scene.run_until_idle()
    scene.live(5)
    assert not scene.firing()
    assert [f.id for f in scene.watch.findings("resolved")] == [fired.id]


@pytest.mark.parametrize("over", [0, 1])
def test_the_boundary_is_the_pool_itself(over: int) -> None:
    """A prompt that fills the pool to the last token waits for another to end, and is served; one more never is."""
    scene = Watched(prefix_caching=False)
    scene.lab.arrive(4, max_tokens=100)
    scene.steps(2)
    large = scene.lab.arrive(scene.lab.pool.usable * scene.lab.manager.block_size + over, max_tokens=1)
    scene.live(10, every=0.2)
    assert large in scene.lab.scheduler.waiting
    assert len(scene.firing(NEVER_FITS)) == over
    scene.steps(200)
    assert scene.lab.scheduler.has_work == bool(over)


def test_a_request_that_outgrew_the_pool_never_fits_again() -> None:
    """An engine that ends no such request: it has filled the pool, is preempted, and too large to come back, however
    little of it is asked for beyond what is cached.
    """
    scene = Spoken(total=9)
    blocks = list(range(1, 9))
    scene.arrive(1, blocks)
    scene.log.progressed([1], [32], [1])
    scene.log.preempted(1, Preempt.KV_BLOCKS, 1, len(blocks), 32)
    scene.log.released(1, blocks, Release.PREEMPTED)
    scene.log.queued(1, Cause.PREEMPTED, at_front=True)
    scene.log.allocation_failed(1, 1, 0)
    scene.log.not_scheduled(1, Cause.KV_BLOCKS, 1)
    scene.say()
    scene.wait(3)
    finding = scene.only(NEVER_FITS)
    assert finding.culprits.requests == ["r-1"]
    assert value(finding, "blocks_needed") == len(blocks) + 1


def test_a_queue_that_moves_is_not_stuck() -> None:
    """Many wait for a pool that is full, for longer than any grace; each fits, and has its turn."""
    scene = Watched(total=33, prefix_caching=False)
    for _ in range(30):
        scene.lab.arrive(100, max_tokens=10)
    while scene.lab.scheduler.has_work:
        scene.live(1)
        assert not scene.firing(NEVER_FITS)
        assert not scene.firing(ENGINE_STALLED)
    waited = [record.waited_ns for record in scene.ledger.ended]
    assert len(waited) == 30
    assert max(sum(w.values()) for w in waited) > 60e9


# -------------------------------------------------------------------- stuck.engine-stalled


def test_a_step_that_does_not_come_back() -> None:
    scene = stalled()
    scene.beat(8)
    finding = scene.only(ENGINE_STALLED)
    assert (finding.severity, finding.verdict) == ("critical", "confirmed")
    assert finding.culprits.requests == ["r-1", "r-2"]
    assert value(finding, "step_in_flight") == scene.lab.launched[0]
    assert value(finding, "stalled_s") == (scene.lab.clock.monotonic_ns() - scene.lab.launched[1]) / 1e9


def test_silence_alone_is_only_likely() -> None:
    scene = stalled()
    scene.silence(8)
    finding = scene.only(ENGINE_STALLED)
    assert finding.verdict == "likely"
    assert "heartbeat" in finding.missing
    assert value(finding, "silent_s") == 8.0


def test_a_process_that_did_not_run_and_goes_on_is_not_stalled() -> None:
    """Its machine was suspended, or had no processor for it: its step is as old as that, and takes its time now."""
    scene = stalled()
    scene.beat(1)
    scene.beat(60, every=60)
    scene.beat(1)
    assert not scene.firing(ENGINE_STALLED)
    scene.beat(4)
    assert scene.only(ENGINE_STALLED).verdict == "confirmed"


def test_a_step_that_hangs_in_a_process_that_hardly_runs_is_found() -> None:
    scene = stalled()
    scene.beat(80, every=4)
    assert scene.only(ENGINE_STALLED)


def test_work_pending_and_no_step_launched() -> None:
    """The engine's thread has died between two steps; the drain thread's heart beats on."""
    scene = Watched()
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(10)
    scene.beat(8)
    finding = scene.only(ENGINE_STALLED)
    assert finding.verdict == "confirmed"
    assert value(finding, "step_in_flight") == "none"
    assert "no step was launched" in finding.explanation


def launched_unreported(steps: int) -> Watched:
    """After so many steps one is launched whose launch is still with the engine's thread: only heartbeats name it."""
    scene = Watched()
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(steps)
    scene.lab.launched = (scene.ledger.state.last_step + 1, scene.lab.clock.monotonic_ns())
    return scene


def test_a_step_that_only_heartbeats_name_and_does_not_come_back() -> None:
    scene = launched_unreported(60)
    scene.beat(8)
    finding = scene.only(ENGINE_STALLED)
    assert finding.verdict == "confirmed"
    assert value(finding, "step_in_flight") == scene.lab.launched[0]
    assert "was launched and has not completed" in finding.explanation


def test_an_early_step_that_only_heartbeats_name_may_compile() -> None:
    scene = launched_unreported(10)
    scene.beat(20)
    assert not scene.firing(ENGINE_STALLED)


def test_it_is_over_when_steps_go_on() -> None:
    scene = stalled()
    scene.beat(8)
    fired = scene.only(ENGINE_STALLED)
    scene.lab.log.step_completed(scene.lab.launched[0], 8_000_000_000, Limit.NONE, *scene.lab.pool.counts()[:3])
    scene.lab.launched = (-1, 0)
    scene.live(4)
    assert not scene.firing(ENGINE_STALLED)
    assert [f.id for f in scene.watch.findings("resolved") if f.code == ENGINE_STALLED] == [fired.id]


def test_a_step_whose_end_was_lost_is_not_a_stall() -> None:
    """Launched, completed, and the batch that said so is lost: the next heartbeat names no step in flight."""
    scene = Watched()
    scene.lab.arrive(20, max_tokens=3)
    scene.steps(2)
    scene.launch()
    scene.skip()
    scene.lab.log.step_completed(scene.lab.launched[0], 10_000_000, Limit.NONE, *scene.lab.pool.counts()[:3])
    scene.lab.launched = (-1, 0)
    scene.lab.flush()
    scene.skip()
    scene.live(20)
    assert scene.ledger.losses
    assert not scene.firing(ENGINE_STALLED)


def test_an_idle_engine_is_not_stalled() -> None:
    scene = Watched()
    scene.lab.arrive(20, max_tokens=10)
    scene.run_until_idle()
    scene.beat(60)
    assert not scene.alarms()
    scene.silence(60)
    assert not scene.alarms()


def test_an_engine_that_stopped_in_good_order_is_not_stalled() -> None:
    scene = Watched()
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(5)
    scene.lab.log.stopped()
    scene.lab.flush()
    scene.look()
    scene.silence(60)
    assert not scene.alarms()


@pytest.mark.parametrize("passes", [True, False])
def test_a_scheduler_that_looks_and_finds_nothing_is_not_stalled(passes: bool) -> None:
    """Wedged behind a request that never fits, nothing is said any more but heartbeats: they tell whether the engine
    still goes over its queue.
    """
    scene, _ = never_fits()
    for _ in range(60):
        if passes:
            assert not scene.lab.scheduler.schedule().shares
        scene.beat(0.5)
    assert bool(scene.firing(ENGINE_STALLED)) == (not passes)
    assert scene.firing(NEVER_FITS)
