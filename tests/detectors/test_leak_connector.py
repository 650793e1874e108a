"""What a connector keeps for too long: a fetch that never reported, an engine that does not ask, and their look-alikes.

leak.finished-held itself is in test_leak.py.
"""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Holder, Status
from kvscope.monitor.detectors.engine_pace import MORE_TIME
from kvscope.monitor.detectors.stuck.waiting_requests import TRANSFER_PROGRESS
from tests.detectors.leaks import fetching, idle_not_polled, remote_load_lost
from tests.detectors.scenes import Spoken, Watched, finished_held, value

FINISHED_HELD = "leak.finished-held"
REMOTE_LOAD_LOST = "leak.remote-load-lost"
IDLE_NOT_POLLED = "leak.idle-not-polled"


def kept_blocks(scene: Watched) -> list[int]:
    return sorted(block for number in scene.lab.manager.tables for block in scene.lab.blocks_of(number))


# -------------------------------------------------------------------- leak.remote-load-lost


def test_requests_aborted_while_their_kv_was_fetched() -> None:
    scene = remote_load_lost(keys=":every=2")
    affected = scene.lab.faults.on[REMOTE_LOAD_LOST].affected
    assert len(affected) == 2
    scene.live(12)
    finding = scene.only(REMOTE_LOAD_LOST)
    assert (finding.severity, finding.verdict, finding.missing) == ("error", "likely", TRANSFER_PROGRESS)
    assert sorted(finding.culprits.requests) == sorted(affected)
    assert finding.culprits.blocks == kept_blocks(scene)
    assert value(finding, "blocks_held") == scene.ledger.balance().finished
    assert affected[0] in finding.explanation
    assert all((finding.do_now, finding.change, finding.wont_help, finding.since))


def test_fetches_of_aborted_requests_that_report_are_no_leak() -> None:
    scene = remote_load_lost(fault=False)
    scene.live(12)
    assert kept_blocks(scene) == []
    assert not scene.alarms()


def test_a_slow_fetch_of_an_aborted_request_gives_its_blocks_back_in_the_end() -> None:
    scene = fetching()
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 100
    request = scene.lab.arrive(20)
    scene.steps(1)
    scene.lab.abort(request)
    scene.live(11)
    firing = scene.only(REMOTE_LOAD_LOST)
    assert firing.culprits.requests == [request.id]
    while request.number in scene.lab.scheduler.deferred:
        scene.live(1)
    scene.live(5)
    assert not scene.firing()
    assert [f.id for f in scene.watch.findings("resolved")] == [firing.id]


def test_no_lease_ends_a_fetch() -> None:
    """What it writes to must stay; a lease is for what is kept to be sent."""
    scene = fetching(lease_s=1.0)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 100
    request = scene.lab.arrive(20)
    scene.steps(1)
    scene.lab.abort(request)
    scene.live(5)
    assert kept_blocks(scene)
    while scene.lab.scheduler.deferred:
        scene.live(1)
    assert kept_blocks(scene) == []


def test_who_came_later_knows_what_was_fetched() -> None:
    scene = remote_load_lost()
    scene.live(12)
    joined = Watched()
    joined.watch.fleet.engines.clear()
    joined.watch.feed([scene.lab.keyframe()])
    joined.watch.settle()
    assert joined.only(REMOTE_LOAD_LOST).culprits == scene.only(REMOTE_LOAD_LOST).culprits


def test_while_events_are_lost_it_is_only_pending() -> None:
    """The fetch may have reported in what was lost; the audit that says that its blocks are still held settles it."""
    scene = remote_load_lost()
    scene.lab.step()
    scene.skip()
    scene.beat(15)  # no step, so no slice of an audit either
    assert scene.ledger.uncertain_since_ns
    assert not scene.firing(REMOTE_LOAD_LOST)
    assert [f.verdict for f in scene.watch.findings("pending") if f.code == REMOTE_LOAD_LOST] == ["likely"]
    scene.live(5, every=0.1)
    assert not scene.ledger.uncertain_since_ns
    assert scene.only(REMOTE_LOAD_LOST).missing == TRANSFER_PROGRESS


def test_a_living_request_that_waits_for_its_fetch_is_another_matter() -> None:
    scene = fetching(faults=["stuck.remote-load"])
    scene.lab.arrive(20)
    scene.live(15)
    assert not scene.firing(REMOTE_LOAD_LOST)
    assert not scene.firing(FINISHED_HELD)


def test_a_fetch_that_was_lost_and_a_free_that_was_are_told_apart() -> None:
    """One request was aborted while its KV was fetched; another ended well, and its completion was dropped."""
    scene = fetching(connector_share=1.0, faults=["leak.remote-load-lost", "leak.finished-held"])
    fetched = scene.lab.arrive(20)
    scene.steps(1)
    scene.lab.abort(fetched)
    sent = scene.lab.arrive(24, max_tokens=2)
    scene.run_until_idle()
    scene.steps(10)
    scene.live(15)
    by_code = {f.code: f.culprits for f in scene.firing()}
    assert by_code.keys() == {REMOTE_LOAD_LOST, FINISHED_HELD}
    for code, request in ((REMOTE_LOAD_LOST, fetched), (FINISHED_HELD, sent)):
        assert by_code[code].requests == scene.lab.faults.on[code].affected == [request.id]
        assert by_code[code].blocks == sorted(scene.lab.blocks_of(request.number))


# -------------------------------------------------------------------- leak.idle-not-polled


def test_an_idle_engine_that_does_not_ask_its_connector() -> None:
    scene = idle_not_polled()
    held = [request.id for request in scene.lab.scheduler.requests.values()]
    scene.live(12)
    finding = scene.only(IDLE_NOT_POLLED)
    assert (finding.severity, finding.verdict) == ("warning", "likely")
    assert finding.culprits.requests == held
    assert finding.culprits.blocks == kept_blocks(scene)
    assert scene.lab.connector is not None
    assert value(finding, "connector_polls") == scene.lab.connector.polls


def test_first_transfers_of_an_engine_that_does_not_ask_are_information_at_first() -> None:
    scene = idle_not_polled(("leak.finished-held.unseen_times=6",))
    scene.live(12)
    (finding,) = [f for f in scene.firing() if f.code == IDLE_NOT_POLLED]
    assert (finding.severity, finding.verdict, finding.missing) == ("info", "cannot-tell", MORE_TIME)
    scene.live(200)
    (finding,) = [f for f in scene.firing() if f.code == IDLE_NOT_POLLED]
    assert (finding.severity, finding.verdict) == ("warning", "likely")


def test_an_engine_that_does_not_ask_is_told_apart_once_the_leases_are_over() -> None:
    """Until then a consumer may still read the blocks, and no transfer has ended yet."""
    scene = idle_not_polled(("leak.finished-held.unseen_times=6",), lease_s=60.0)
    scene.live(55)
    (finding,) = [f for f in scene.firing() if f.code == IDLE_NOT_POLLED]
    assert (finding.severity, finding.verdict, finding.missing) == ("info", "cannot-tell", MORE_TIME)
    scene.live(10)
    (finding,) = [f for f in scene.firing() if f.code == IDLE_NOT_POLLED]
    assert (finding.severity, finding.verdict) == ("warning", "confirmed")


def test_it_ends_with_the_next_request() -> None:
    scene = idle_not_polled()
    scene.live(12)
    firing = scene.only(IDLE_NOT_POLLED)
    scene.lab.arrive(4, max_tokens=10)
    scene.live(5)
    assert scene.lab.scheduler.deferred.keys().isdisjoint(range(4))
    assert [f.id for f in scene.watch.findings("resolved") if f.code == IDLE_NOT_POLLED] == [firing.id]


@pytest.mark.parametrize(("sleep_s", "found"), [(8, True), (2, False)])
def test_what_is_reported_as_soon_as_the_engine_is_woken_was_sent_before(sleep_s: int, found: bool) -> None:
    """It never sleeps for as long as a transfer may take, and keeps blocks through each sleep. Two seconds without a
    poll may be two late heartbeats, and one sleep may be the last.
    """
    scene = idle_not_polled()
    ended = [request.id for request in scene.lab.scheduler.requests.values()]
    scene.live(sleep_s)
    ended.append(scene.lab.arrive(20, max_tokens=2).id)
    scene.run_until_idle()
    scene.live(sleep_s)
    assert not scene.firing(IDLE_NOT_POLLED)
    scene.lab.arrive(4, max_tokens=10)
    scene.steps(5)
    scene.live(1)
    findings = scene.firing(IDLE_NOT_POLLED)
    assert bool(findings) is found
    assert len(scene.ledger.beats.late_sends.recent) == len(ended)
    for finding in findings:
        assert (finding.severity, finding.verdict, finding.culprits.requests) == ("warning", "likely", ended)
        assert value(finding, "longest_sleep_s") == pytest.approx(sleep_s, abs=1)


def test_transfers_that_end_while_a_woken_engine_works_show_no_sleep() -> None:
    """The engine asks the connector again, which is done with them only seconds later."""
    scene = Watched(connector_share=1.0, faults=[IDLE_NOT_POLLED])
    connector = scene.lab.connector
    assert connector is not None
    connector.polls_needed = 20
    for _ in range(2):
        scene.lab.arrive(10, max_tokens=4)
        scene.run_until_idle()
        scene.live(8)
        scene.lab.arrive(4, max_tokens=30)
        scene.live(20)
    assert len(scene.ledger.outside_waits.sends.ended) >= 2
    assert not scene.ledger.beats.late_sends.recent
    assert not scene.alarms()


def test_an_idle_engine_that_asks_and_hears_nothing_is_finished_held() -> None:
    scene = finished_held()
    scene.live(12)
    assert scene.only(FINISHED_HELD).culprits.blocks == kept_blocks(scene)
    assert not scene.watch.findings("resolved")


def test_an_idle_engine_with_nothing_kept_need_not_ask() -> None:
    scene = idle_not_polled(fault=False)
    scene.live(3)
    assert not scene.lab.scheduler.deferred
    scene.beat(30)
    assert not scene.alarms()


@pytest.mark.parametrize("received", [True, False])
def test_what_is_kept_while_a_step_does_not_end_is_no_leak(received: bool) -> None:
    """Nobody asks the connector then either; and of an engine that is silent nobody knows."""
    scene = Watched(connector_share=1.0)
    assert scene.lab.connector is not None
    scene.lab.connector.polls_needed = 50
    kept = scene.lab.arrive(20, max_tokens=2)
    scene.lab.arrive(20, max_tokens=200)
    while kept.number not in scene.lab.scheduler.deferred:
        scene.steps(1)
    scene.live(1)
    scene.launch()
    (scene.beat if received else scene.silence)(60)
    assert kept.number in scene.lab.scheduler.deferred
    assert {f.code for f in scene.watch.findings() if f.code.startswith("leak")} == set()
    assert scene.firing("stuck.engine-stalled")


def test_without_heartbeats_nobody_knows_whether_it_asks() -> None:
    """Then what is kept is leak.finished-held: the blocks are the same, and so is the remedy that always helps."""
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.finished(7, Status.FINISHED_STOPPED)
    scene.log.free_deferred(7, [3, 4], Holder.CONNECTOR)
    scene.say()
    scene.wait(11)
    assert scene.only(FINISHED_HELD).culprits.blocks == [3, 4]
