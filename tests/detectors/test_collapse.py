"""collapse.lockstep, and falls that are none."""

from __future__ import annotations

from kvscope.monitor.detectors.registry import THRESHOLDS
from kvscope.monitor.events.kinds import Status
from tests.detectors.scenes import Watched, lockstep, value

LOCKSTEP = "collapse.lockstep"


def test_alike_requests_end_together_and_the_next_wave_queues() -> None:
    scene = lockstep(waves=2)
    scene.watch.settle()
    finding = scene.only(LOCKSTEP)
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")
    first_wave = [r for r in scene.ledger.ended if r.number <= 8]
    assert finding.culprits.requests == [r.id for r in sorted(first_wave, key=lambda r: r.finished_ns)]
    assert value(finding, "blocks_freed_by_finishing") == sum(r.peak_blocks for r in first_wave)
    assert value(finding, "preemptions") == 0
    assert value(finding, "usage_after") == 0
    spread_s = (max(r.finished_ns for r in first_wave) - min(r.finished_ns for r in first_wave)) / 1e9
    assert value(finding, "within_s") == round(spread_s, 3)
    waiting, running = value(finding, "next_wave_waiting"), value(finding, "next_wave_running")
    assert isinstance(waiting, int)
    assert isinstance(running, int)
    assert waiting > running


def test_every_wave_is_the_same_trouble() -> None:
    scene = lockstep(waves=4)
    scene.live(1)
    finding = scene.only(LOCKSTEP)
    assert value(finding, "collapses_seen") == 4
    assert len([t for t in scene.watch.take_transitions() if t.finding.judgement.code == LOCKSTEP]) == 1


def test_it_is_forgotten_after_a_while() -> None:
    scene = lockstep(waves=2)
    scene.live(scene.watch.settings(THRESHOLDS[f"{LOCKSTEP}.remember_s"]) + 5)
    assert not scene.firing(LOCKSTEP)
    assert [f.code for f in scene.watch.findings("resolved")].count(LOCKSTEP) == 1


def test_a_load_that_simply_ends_is_no_collapse() -> None:
    scene = lockstep(waves=1)
    scene.live(60)
    assert not scene.alarms()


def test_requests_that_end_one_by_one_are_no_collapse() -> None:
    scene = lockstep(waves=4, spread=True)
    scene.live(5)
    assert not scene.alarms()


def test_a_queue_of_many_small_requests_is_no_collapse() -> None:
    """Dozens end within a second, and dozens wait: but the pool does not empty with them."""
    scene = Watched(prefix_caching=False)
    for _ in range(400):
        scene.lab.arrive(6, max_tokens=4)
    scene.run_until_idle(seconds=0.02)
    scene.live(5)
    assert not scene.alarms()


def test_a_wave_that_is_aborted_is_no_collapse() -> None:
    """The clients went away: usage falls as steeply, and the next wave queues, but nobody came to its end."""
    scene = Watched(total=161, prefix_caching=False, max_num_batched_tokens=64)
    for _ in range(2):
        requests = [scene.lab.arrive(60, max_tokens=200) for _ in range(8)]
        scene.steps(20, seconds=0.4)
        assert scene.ledger.state.used > 100
        for request in requests:
            scene.lab.abort(request)
            assert request.status == Status.FINISHED_ABORTED
    scene.live(5)
    assert not scene.alarms()


def test_short_requests_that_end_by_chance_within_a_second_are_no_collapse() -> None:
    """All that ran ends within a second, the pool empties and the next ones queue; but a second is all they live."""
    scene = Watched(total=161, prefix_caching=False, max_num_batched_tokens=64)
    for _ in range(6):
        for n in range(8):
            scene.lab.arrive(60, max_tokens=10 + 5 * n)
        scene.run_until_idle(seconds=0.02)
    records = scene.ledger.ended
    spread = max(r.finished_ns for r in list(records)[:8]) - min(r.finished_ns for r in list(records)[:8])
    assert spread < scene.watch.settings(THRESHOLDS[f"{LOCKSTEP}.within_s"]) * 1e9
    scene.live(5)
    assert not scene.alarms()
