"""What is kept for the connector, by what it owes: that it has sent it, or has fetched it (leak/deferred_blocks.py).

And leases of the connector (leak.lease-burst, lease_burst.py), which nothing else has.
"""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Holder, Load, Release, Status
from tests.detectors.spoken import Spoken, value


@pytest.mark.parametrize(
    ("fetched", "code"), [(False, "leak.finished-held"), (True, "leak.remote-load-lost")], ids=["sent", "fetched"]
)
def test_blocks_kept_to_be_sent_and_blocks_that_a_fetch_fills_are_two_leaks(fetched: bool, code: str) -> None:
    scene = Spoken()
    scene.log.arrived(1, "r-1", 8, 8, 0, 2, 4)
    scene.log.allocated(1, [1, 2])
    if fetched:
        scene.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    else:
        scene.log.admitted(1, 0)
    scene.say()
    scene.log.finished(1, Status.FINISHED_ABORTED if fetched else Status.FINISHED_STOPPED)
    scene.log.free_deferred(1, [1, 2], Holder.CONNECTOR)
    scene.say()
    scene.wait(400)
    finding = scene.only(code)
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-1"], [1, 2])


@pytest.mark.parametrize(("failed", "severity"), [(3, "warning"), (2, "info")])
def test_requests_that_fail_while_their_kv_is_fetched_are_named(failed: int, severity: str) -> None:
    scene = Spoken()
    for number in range(6):
        scene.log.arrived(number, f"r-{number}", 8, 8, 0, 2, 4)
        scene.log.waiting_on(number, Status.WAITING_FOR_REMOTE_KVS)
        if number >= failed:
            scene.log.remote_load(number, Load.DELIVERED, 8)
        scene.say()
        scene.log.finished(number, Status.FINISHED_ERROR if number < 4 else Status.FINISHED_STOPPED)
    scene.say()
    finding = scene.only("stuck.remote-load")
    assert (finding.severity, finding.verdict) == (severity, "likely")
    assert finding.culprits.requests == [f"r-{number}" for number in range(failed)]


def test_a_deadline_of_something_other_than_the_connector_is_no_lease() -> None:
    """Three leases of the connector have run out, and a session has a deadline of its own."""
    scene = Spoken()
    deadline_ns = scene.clock.ns + 20_000_000_000
    for number, holder in enumerate((Holder.CONNECTOR, Holder.CONNECTOR, Holder.CONNECTOR, Holder.SESSION)):
        scene.arrive(number, [1 + number])
        scene.log.finished(number, Status.FINISHED_LENGTH_CAPPED)
        scene.log.free_deferred(number, [1 + number], holder, lease_deadline_ns=deadline_ns)
    scene.wait(21)
    for number in range(3):
        scene.log.released(number, [1 + number], Release.LEASE_EXPIRED)
    scene.say()
    assert value(scene.firing("leak.lease-burst")[0], "requests_under_lease") == 0
