"""collapse.lockstep, and falls that are none."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope.monitor.contract.kinds import Cause, Holder, Limit, Preempt, Release, Status
from kvscope.monitor.detectors.registry import CATALOGUE, THRESHOLDS
from tests.detectors.scenes import Watched, lockstep, value
from tests.detectors.spoken import Spoken

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


def queue_eight(scene: Spoken) -> None:
    """A second later eight requests come, and a pass leaves them waiting."""
    scene.wait(1)
    for number in range(21, 29):
        scene.log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        scene.log.not_scheduled(number, Cause.TOKEN_BUDGET, 1)
    scene.wait(1)
    scene.wait(1)


def wave_ends(*, together: int, preempted: int) -> Spoken:
    """Requests hold a pool of 80 blocks in equal parts; they end at once, some by preemption; then eight wait."""
    scene = Spoken(total=81)
    numbers = range(1, together + preempted + 1)
    each = 80 // len(numbers)
    held = {number: list(range(1 + each * (number - 1), 1 + each * number)) for number in numbers}
    for number, blocks in held.items():
        scene.arrive(number, blocks)
    for _ in range(12):
        scene.wait(1)
    for number, blocks in held.items():
        if number > together:
            scene.log.released(number, blocks, Release.PREEMPTED)
            scene.log.preempted(number, Preempt.KV_BLOCKS, 0, each, 4 * each)
        else:
            scene.log.finished(number, Status.FINISHED_STOPPED)
            scene.log.released(number, blocks, Release.FINISHED)
    queue_eight(scene)
    return scene


@pytest.mark.parametrize(("together", "preempted", "fires"), [(8, 0, True), (7, 1, False), (4, 0, True), (3, 0, False)])
def test_four_requests_that_end_together_without_a_preemption_are_a_wave(
    together: int, preempted: int, fires: bool
) -> None:
    scene = wave_ends(together=together, preempted=preempted)
    assert bool(scene.firing(LOCKSTEP)) == fires


@pytest.mark.parametrize(
    ("steps_between", "steps_later", "verdict"),
    [
        (1, 0, "confirmed"),
        (2, 0, "likely"),
        (6, 0, "likely"),
        (6, 4, "likely"),
        (6, 5, "confirmed"),
        (6, 6, "confirmed"),
        (6, 8, "likely"),
    ],
)
def test_requests_that_end_over_many_steps_and_did_not_run_equally_long_may_end_so_by_chance(
    steps_between: int, steps_later: int, verdict: str
) -> None:
    """Two of eight end half a second before the others, steps of half a second or of less lie between."""
    scene = wave_of_eight(early=2, steps_between=steps_between, steps_later=steps_later)
    (finding,) = scene.firing(LOCKSTEP)
    assert finding.verdict == verdict
    assert ("end as close" in finding.missing) == (verdict == "likely")


def run_for_12_s(scene: Spoken, numbers: list[int], steps: int) -> None:
    """Requests run for so many equal steps, or for none that are told."""
    for second in range(12):
        step, begun = divmod(second * steps, 12)
        if steps and not begun:
            scene.log.step_launched(step, numbers, [1] * len(numbers))
        scene.wait(1)
        if steps and (second + 1) * steps % 12 == 0:
            scene.log.step_completed(step, round(12e9 / steps), Limit.NONE, -1, -1, -1)


def run_steps_within(scene: Spoken, seconds: float, steps: range, number: int) -> None:
    """One request runs for these steps, each of so many seconds."""
    for step in steps:
        scene.log.step_launched(step, [number], [1])
        scene.wait(seconds)
        scene.log.step_completed(step, round(seconds * 1e9), Limit.NONE, -1, -1, -1)


def test_ends_over_four_steps_are_likely_however_long_the_longest_step_was() -> None:
    """Eight end over four steps, in less time than the longest step of the epoch takes."""
    scene = wave_of_eight(early=2, steps_between=3, longest_s=2.0)
    (finding,) = scene.firing(LOCKSTEP)
    assert finding.verdict == "likely"


def wave_of_eight(
    *,
    blocks: int = 80,
    stay: int = 0,
    queued: int = 8,
    outside: int = 0,
    kept: int = 0,
    after_s: float = 1.0,
    early: int = 0,
    steps_between: int = 1,
    steps_later: int = 0,
    longest_s: float = 0.0,
    left_by_a_pass: bool = True,
    run_steps: int = 0,
    between: int = 0,
) -> Spoken:
    """Eight requests hold so many of 80 blocks and end at once; `stay` others go on with one block each, and then
    `between` more run. Then `queued` wait, `outside` of them for KV from elsewhere. The connector keeps what `kept` of
    the eight had until then.
    `early` end half a second before the others, and so many steps lie between. The others come `steps_later` such
    steps after them. A step of `longest_s` comes before all.
    A pass leaves those that wait, unless they came after the last one. The eight run for `run_steps` equal steps.
    """
    scene = Spoken(total=81)
    each = blocks // 8
    held = {number: list(range(1 + each * (number - 1), 1 + each * number)) for number in range(1, 9)}
    if longest_s:
        run_steps_within(scene, longest_s, range(1), 9)
    for number, mine in held.items():
        if number == early + 1:
            run_steps_within(scene, 0.5 / steps_between, range(1, 1 + steps_later), 1)
        scene.arrive(number, mine)
    for number in range(11, 11 + stay):
        scene.arrive(number, [70 + number - 11])
    run_for_12_s(scene, [*held], run_steps)
    for number, mine in held.items():
        if early and number == early + 1:
            first = 1 + steps_later
            run_steps_within(scene, 0.5 / steps_between, range(first, first + steps_between), 8)
        scene.log.finished(number, Status.FINISHED_STOPPED)
        if number <= kept:
            scene.log.free_deferred(number, mine, Holder.CONNECTOR)
        else:
            scene.log.released(number, mine, Release.FINISHED)
    scene.wait(min(after_s, 1.0))
    for _ in range(round(after_s - 1.0)):
        scene.wait(1)
    for number in range(31, 31 + between):
        scene.arrive(number, [40 + number])
    scene.wait(1)
    for number in range(21, 21 + queued):
        scene.log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
        if number < 21 + outside:
            scene.log.waiting_on(number, Status.WAITING_FOR_REMOTE_KVS)
        elif left_by_a_pass:
            scene.log.not_scheduled(number, Cause.TOKEN_BUDGET, 1)
    scene.wait(1)
    for number in range(1, 1 + kept):
        scene.log.released(number, held[number], Release.FINISHED)
    scene.wait(1)
    return scene


@pytest.mark.parametrize(
    ("scene", "fires"),
    [
        ({"blocks": 40}, True),
        ({"blocks": 32}, False),  # four tenths of the pool
        ({"blocks": 64, "stay": 2}, True),
        ({"blocks": 64, "stay": 3}, False),  # more than a quarter of those that ran go on
        ({"queued": 4}, True),
        ({"queued": 3}, False),  # of a wave of eight
        ({"after_s": 25.0}, True),
        ({"queued": 8, "between": 3}, True),
        ({"queued": 8, "between": 4}, False),  # most of a wave has run since, and these came after it
        ({"after_s": 35.0}, False),
        ({"kept": 4}, True),
        ({"kept": 5}, False),  # most of the pool is still taken: the queue waits for the connector
        ({"queued": 8, "outside": 4}, True),
        ({"queued": 8, "outside": 5}, False),  # three wait for a place, and the others for KV from elsewhere
        ({"left_by_a_pass": False}, False),  # the next pass may admit all of them
        ({"run_steps": 3}, True),
        ({"run_steps": 2}, False),  # of eight that run for one or two steps, most end in the same one anyway
    ],
)
def test_a_wave_empties_half_the_pool_and_half_as_many_queue_soon(scene: dict[str, Any], fires: bool) -> None:
    assert bool(wave_of_eight(**scene).firing(LOCKSTEP)) == fires


@pytest.mark.parametrize(
    ("waited_s", "ran_s", "later_s", "fires"),
    [
        (0.0, 4, 0.3, True),
        (0.0, 4, 0.5, False),  # over a tenth of their run
        (8.0, 4, 0.5, False),  # however long they waited before it
    ],
)
def test_a_wave_ends_within_a_tenth_of_its_run(waited_s: float, ran_s: int, later_s: float, fires: bool) -> None:
    """The last of eight requests ends later than the others."""
    scene = Spoken(total=81)
    for number in range(1, 9):
        scene.log.arrived(number, f"r-{number}", 40, 8, 0, 10, 12)
    scene.wait(waited_s)
    for number in range(1, 9):
        scene.log.allocated(number, blocks_of(number))
        scene.log.admitted(number, 0)
    for _ in range(ran_s):
        scene.wait(1)
    for number in range(1, 9):
        if number == 8:
            scene.wait(later_s)
        scene.log.finished(number, Status.FINISHED_STOPPED)
        scene.log.released(number, blocks_of(number), Release.FINISHED)
    queue_eight(scene)
    assert bool(scene.firing(LOCKSTEP)) == fires


def blocks_of(number: int) -> list[int]:
    """An eighth of the pool."""
    return [*range(10 * number - 9, 10 * number + 1)]


def test_requests_that_never_ran_are_no_wave() -> None:
    """They arrive and end at one moment, with blocks: nothing says how long they had them."""
    scene = Spoken(total=81)
    for number in range(1, 9):
        scene.arrive(number, blocks_of(number))
    for number in range(1, 9):
        scene.log.finished(number, Status.FINISHED_STOPPED)
        scene.log.released(number, blocks_of(number), Release.FINISHED)
    scene.wait(1)
    assert not [*CATALOGUE[LOCKSTEP]().detect(scene.ledger, scene.watch.settings)]


def test_usage_before_a_burst_is_that_before_its_first_end() -> None:
    """One of eight ends half a second before the others."""
    (finding,) = wave_of_eight(early=1, steps_between=6).firing(LOCKSTEP)
    assert value(finding, "usage_before") == 100
