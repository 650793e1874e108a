"""leak.finished-held and leak.unaccounted, and what only looks like them."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Holder, Release, Status
from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.detectors.registry import THRESHOLDS
from tests.detectors.scenes import Spoken, Watched, finished_held, unaccounted, value

FINISHED_HELD = "leak.finished-held"
UNACCOUNTED = "leak.unaccounted"


# -------------------------------------------------------------------- leak.finished-held


def test_finished_requests_whose_transfer_is_never_confirmed() -> None:
    scene = finished_held("leak.finished-held:every=2")
    scene.live(12)
    affected = scene.lab.faults.on[FINISHED_HELD].affected
    assert len(affected) == 3
    finding = scene.only(FINISHED_HELD)
    assert (finding.severity, finding.verdict) == ("error", "likely")
    assert "without either, a slow transfer looks the same" in finding.missing
    assert sorted(finding.culprits.requests) == sorted(affected)
    kept = sorted(block for number in scene.lab.manager.tables for block in scene.lab.blocks_of(number))
    assert finding.culprits.blocks == kept
    assert value(finding, "blocks_held") == len(kept) == scene.ledger.balance().finished
    assert value(finding, "requests_held") == 3
    assert value(finding, "share_of_pool") == round(len(kept) / scene.lab.pool.usable, 4)
    oldest = finding.culprits.requests[0]
    assert oldest in finding.explanation
    assert all((finding.do_now, finding.change, finding.wont_help, finding.since))


def test_a_slow_transfer_within_its_grace_is_no_leak() -> None:
    """Three polls, three seconds apart, as a slow consumer would take: under the 10 s of grace at every moment."""
    scene = Watched(connector_share=1.0)
    for n in range(20):
        scene.lab.arrive(8 + n, max_tokens=3)
        scene.live(3, every=3)
    scene.run_until_idle()
    scene.live(12, every=3)
    assert scene.lab.scheduler.deferred == {}
    assert [f.code for f in scene.watch.findings() if severity_at_least(f.severity, "warning")] == []


def test_a_leak_that_ends_is_resolved() -> None:
    scene = Watched(connector_share=1.0)
    request = scene.lab.arrive(8, max_tokens=3)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 40
    scene.run_until_idle()
    scene.live(15, every=3)
    firing = scene.only(FINISHED_HELD)
    assert firing.culprits.requests == [request.id]
    scene.live(150, every=3)
    assert scene.lab.scheduler.deferred == {}
    assert scene.firing(FINISHED_HELD) == []
    resolved = [f for f in scene.watch.findings("resolved") if f.code == FINISHED_HELD]
    assert [f.id for f in resolved] == [firing.id]


def deferred(holder: Holder, lease_s: float = 0.0) -> Spoken:
    """Request r-7 has ended and its four blocks are kept, with or without a lease."""
    scene = Spoken()
    scene.arrive(7, [3, 4, 5, 6])
    scene.say()
    scene.log.finished(7, Status.FINISHED_STOPPED)
    lease = scene.clock.monotonic_ns() + round(lease_s * 1e9) if lease_s else 0
    scene.log.free_deferred(7, [3, 4, 5, 6], holder, lease_deadline_ns=lease)
    scene.say()
    return scene


def test_a_lease_counts_instead_of_the_grace() -> None:
    scene = deferred(Holder.CONNECTOR, lease_s=60)
    slack = scene.watch.settings(THRESHOLDS[f"{FINISHED_HELD}.lease_slack_s"])
    scene.wait(60 + slack - 0.1)
    assert not scene.firing(FINISHED_HELD)
    scene.wait(0.2)
    finding = scene.only(FINISHED_HELD)
    assert finding.culprits.requests == ["r-7"]
    assert finding.culprits.blocks == [3, 4, 5, 6]
    assert (finding.verdict, finding.missing) == ("confirmed", "")
    assert "NixlConnector" in finding.explanation


def test_an_engine_may_look_at_a_lease_seconds_after_its_end() -> None:
    scene = deferred(Holder.CONNECTOR, lease_s=60)
    scene.wait(64.5)
    assert not scene.firing(FINISHED_HELD)
    scene.wait(1)
    assert scene.firing(FINISHED_HELD)


def test_a_lease_that_frees_is_no_leak() -> None:
    scene = deferred(Holder.CONNECTOR, lease_s=60)
    scene.wait(60)
    scene.log.released(7, [6, 5, 4, 3], Release.LEASE_EXPIRED)
    scene.wait(0.1)
    scene.wait(30)
    assert not scene.alarms()


@pytest.mark.parametrize("holder", [Holder.FENCE, Holder.SESSION])
def test_blocks_that_another_than_the_connector_keeps_are_not_this_leak(holder: Holder) -> None:
    scene = deferred(holder)
    scene.wait(100)
    assert not scene.firing(FINISHED_HELD)
    assert scene.ledger.balance().finished == 4


# -------------------------------------------------------------------- leak.unaccounted


def test_a_free_that_an_abort_skipped() -> None:
    """Two blocks are lost; five more are shared with the living, and will be."""
    scene = unaccounted()
    scene.live(3, every=0.1)
    finding = scene.only(UNACCOUNTED)
    assert (finding.severity, finding.verdict) == ("error", "confirmed")
    assert finding.culprits.requests == scene.lab.faults.on[UNACCOUNTED].affected == ["r-1"]
    unexplained = scene.ledger.state.unexplained_references()
    assert finding.culprits.blocks == list(unexplained)
    assert value(finding, "unexplained_references") == sum(unexplained.values())
    lost = scene.ledger.state.unaccounted()
    assert value(finding, "unaccounted_blocks") == len(lost) == scene.ledger.balance().unaccounted
    shared = len(unexplained) - len(lost)
    assert shared == 5
    assert f"{shared} more are still shared" in finding.explanation
    scene.run_until_idle()
    scene.live(3)
    grown = scene.only(UNACCOUNTED)
    assert grown.id == finding.id
    assert value(grown, "unaccounted_blocks") == len(unexplained)
    assert "shared" not in grown.explanation


def test_without_an_audit_since_it_is_only_likely() -> None:
    scene = unaccounted()
    scene.beat(3)  # no step, so no slice of an audit either
    finding = scene.only(UNACCOUNTED)
    assert finding.verdict == "likely"
    assert "audit" in finding.missing
    scene.live(5, every=0.1)
    finding = scene.only(UNACCOUNTED)
    assert (finding.verdict, finding.missing) == ("confirmed", "")


def test_who_joined_late_sees_the_same_leak() -> None:
    scene = unaccounted()
    scene.live(3, every=0.1)
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed([scene.lab.keyframe()])
    joined.watch.settle()
    late, early = joined.only(UNACCOUNTED), scene.only(UNACCOUNTED)
    assert (late.culprits, late.since, late.verdict) == (early.culprits, early.since, early.verdict)


def test_an_abort_that_frees_is_no_leak() -> None:
    scene = unaccounted(fault="")
    scene.live(5, every=0.1)
    assert not scene.alarms()
    assert scene.ledger.balance().unaccounted == scene.ledger.balance().unexplained_references == 0


def test_a_free_said_one_batch_late_is_no_leak() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.say()
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.wait(1)
    assert scene.ledger.balance().unaccounted == 2
    scene.log.released(7, [4, 3], Release.FINISHED)
    scene.wait(1)
    scene.wait(10)
    assert scene.ledger.balance().unaccounted == 0
    assert not scene.firing()
    assert not scene.watch.findings("resolved")


def test_a_warm_prefix_cache_is_no_leak() -> None:
    """Usage by hashes stays, usage by references goes to 0 at every idle moment."""
    scene = Watched()
    for _ in range(6):
        for _ in range(4):
            scene.lab.arrive(30, max_tokens=4)
        scene.run_until_idle()
        assert scene.ledger.state.used == 0
        scene.live(12)
    assert scene.ledger.state.cached_idle > scene.lab.pool.usable / 2
    assert not scene.alarms()
