"""What made usage fall: every block that became free has a reason, and the sum is the engine's own."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvscope.monitor.base.text import moment
from kvscope.monitor.contract.kinds import Release
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.usage_drop import steepest_fall, usage_drop
from tests.detectors.scenes import Spoken, Watched, lockstep
from tests.detectors.waste import preempt_all

S = 1_000_000_000


def churn() -> Watched:
    """Prefixes that are shared, preemptions, aborts, blocks that a connector keeps: everything at once."""
    scene = Watched(connector_share=0.5, total=33)
    rng = random.Random(5)
    shared = [list(range(8 * n, 8 * n + 24)) for n in range(3)]
    for n in range(60):
        request = scene.lab.arrive([*rng.choice(shared), n, n + 1], max_tokens=rng.randint(1, 30))
        scene.steps(rng.randint(1, 6), seconds=0.05)
        if n % 7 == 3 and request.number in scene.lab.scheduler.requests:
            scene.lab.abort(request)
    scene.run_until_idle()
    scene.steps(10)
    return scene


def used_at(ledger: EngineLedger, at_ns: int) -> int:
    """By the engine's own count."""
    return next((batch.used for batch in reversed(ledger.recent) if batch.wall_ns <= at_ns), 0)


def test_every_window_adds_up_to_the_engines_own_counts() -> None:
    ledger = churn().ledger
    first, last = ledger.recent[0].wall_ns, ledger.now_ns
    taken = freed = 0
    for tenth in range(10):
        at = first + (2 * tenth + 1) * (last - first) // 20
        reported = usage_drop(ledger, at, (last - first) / 1e10)
        half = round((last - first) / 20)
        assert reported.is_complete
        assert reported.unexplained_blocks == 0
        assert reported.used_after == used_at(ledger, at + half)
        taken += reported.allocated
        freed += sum(one.blocks for one in reported.freed)
    assert taken
    assert taken - freed == used_at(ledger, last)


def test_all_that_was_released_in_a_life_is_in_it_by_its_reason() -> None:
    ledger = churn().ledger
    seconds = 2 * (ledger.now_ns - ledger.recent[0].wall_ns) / 1e9 + 2
    reported = usage_drop(ledger, ledger.now_ns, seconds)
    totals = ledger.state.totals
    released = {Release(reason).name: count for reason, count in totals.released.items()}
    assert {one.reason: one.blocks + one.references_released for one in reported.freed} == released
    assert any(one.references_released for one in reported.freed)
    assert reported.preemptions == sum(totals.preemptions.values()) == len(reported.preempted)
    assert sum(one.tokens_lost for one in reported.preempted) == totals.tokens_lost > 0
    assert reported.finished == sum(totals.finished.values())
    assert reported.work.steps == totals.steps
    assert Counter(reported.work.limits).total() == totals.steps
    assert reported.work.output_tokens == ledger.points[-1].output_tokens


def test_lockstep_is_told_from_preemption() -> None:
    ledger = lockstep().ledger
    together = usage_drop(ledger, steepest_fall(ledger.points, 4.0), 4.0)
    assert [one.reason for one in together.freed] == ["FINISHED"]
    assert (together.preemptions, together.unexplained_blocks) == (0, 0)
    assert together.highest is not None
    assert together.lowest is not None
    assert together.lowest.used < together.highest.used / 2
    assert together.freed_in_drop["FINISHED"] >= together.highest.used - together.lowest.used
    ledger = preempt_all().ledger
    reported = usage_drop(ledger, steepest_fall(ledger.points, 4.0), 4.0)
    assert reported.freed[0].reason == "PREEMPTED"
    assert reported.preemptions == sum(ledger.state.totals.preemptions.values())


def test_a_loss_is_seen_in_the_sum() -> None:
    scene = Watched()
    scene.lab.arrive(40, max_tokens=60)
    scene.steps(5)
    scene.lab.arrive(40, max_tokens=4)
    scene.lab.step()
    scene.lab.step()
    scene.skip()
    scene.steps(4)
    ledger = scene.ledger
    assert usage_drop(ledger, ledger.now_ns, 10.0).unexplained_blocks


def test_detached_blocks_are_freed_by_no_request() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.detached(7, [3])
    scene.log.reclaimed([3], Release.OUT_OF_WINDOW)
    scene.log.released(7, [4], Release.OUT_OF_WINDOW)
    scene.wait(1)
    (freed,) = usage_drop(scene.ledger, scene.ledger.now_ns, 10.0).freed
    assert (freed.blocks, freed.requests) == (2, ["blocks that were detached", "r-7"])


def test_a_window_with_the_first_batch_of_an_engine_is_whole() -> None:
    scene = Spoken()
    assert [batch.sequence for batch in scene.ledger.recent] == [0]
    found = usage_drop(scene.ledger, scene.ledger.now_ns, 10.0)
    assert (found.is_complete, found.used_before) == (True, 0)


def test_what_is_no_longer_kept_is_not_whole() -> None:
    ledger = churn().ledger
    for _ in range(len(ledger.recent) // 2):
        ledger.recent.popleft()
    kept_from = ledger.recent[0].wall_ns
    assert not usage_drop(ledger, kept_from, 2.0).is_complete
    later = usage_drop(ledger, kept_from + 2 * S, 2.0)
    assert (later.is_complete, later.unexplained_blocks) == (True, 0)


@pytest.mark.parametrize("window_s", [0.5, 3.0, 60.0])
def test_the_steepest_fall(window_s: float) -> None:
    points = [(p.at_ns, p.balance.total - p.balance.free - p.balance.cached_idle) for p in churn().ledger.points]

    def deepest(slack_ns: float, since_ns: float, until_ns: float) -> int:
        inside = [(at, used) for at, used in points if since_ns <= at <= until_ns]
        return max(
            used - low for i, (at, used) in enumerate(inside) for later, low in inside[i:] if later - at <= slack_ns
        )

    at_ns = steepest_fall(churn().ledger.points, window_s)
    half_ns = window_s * S / 2
    everywhere = deepest(window_s * S, 0, points[-1][0])
    assert everywhere > 0
    assert deepest(window_s * S, at_ns - half_ns - 1, at_ns + half_ns + 1) == everywhere


def test_times() -> None:
    near = moment("2026-03-01T12:00:00Z", 0)
    assert moment("11:59:58.5", near) == near - 1_500_000_000
    assert moment("12:00:01", near) == near - 86_399 * S  # yesterday's
    assert moment("2026-03-01T13:00:00+01:00", 0) == moment("2026-03-01T12:00:00", 0) == near
    for wrong in ("", "noon", "25:00:00", "12:61:00", "2026-13-01T00:00:00"):
        with pytest.raises(ValueError, match="is not a time"):
            moment(wrong, near)
