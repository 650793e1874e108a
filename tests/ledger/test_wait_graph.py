"""The wait-for graph: who holds what a request waits for, whether the holder moves, and cycles."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Holder, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.wait_graph import WaitGraph, WaitsFor, wait_of
from tests.detectors import leaks, stuck
from tests.detectors.scenes import Spoken, Watched, never_fits, unaccounted


def edge_of(ledger: EngineLedger, name: str) -> WaitsFor:
    record = ledger.request(name)
    assert record is not None
    edge = WaitGraph(ledger).waits_for(record)
    assert edge is not None
    return edge


def test_two_that_hold_what_the_other_lacks_are_a_cycle_until_one_of_them_runs() -> None:
    scene = stuck.parked_loads()
    scene.live(5)
    ledger = scene.ledger
    head = ledger.head()
    assert head is not None
    others = {record.id for record in ledger.living().waiting}
    assert set(WaitGraph(ledger).cycle_of(head)) == others
    sound = stuck.head_of_line()[0]
    head = sound.ledger.head()
    assert head is not None
    assert WaitGraph(sound.ledger).cycle_of(head) == []


def test_one_that_needs_more_than_the_pool_is_no_cycle() -> None:
    scene, big = never_fits()
    record = scene.ledger.request(big.id)
    assert record is not None
    assert WaitGraph(scene.ledger).cycle_of(record) == []
    assert edge_of(scene.ledger, "small-1").resource == "place-in-queue"
    assert [holder.name for holder in edge_of(scene.ledger, "small-1").holders] == [big.id]


def test_each_wait_outside_the_scheduler_names_its_resource_and_holder() -> None:
    fetched = stuck.remote_load()
    (record,) = [r for r in fetched.ledger.state.requests.values() if r.fetching_ns]
    edge = edge_of(fetched.ledger, record.id)
    assert (edge.resource, edge.holders[0].kind, edge.holders[0].unit) == ("remote-kv", "connector", "transfers")
    scene, request = stuck.grammar()
    edge = edge_of(scene.ledger, request.id)
    assert (edge.resource, edge.holders[0].kind, edge.holders[0].moves) == ("grammar", "compiler", None)


def waiting_for(cause: Cause) -> EngineLedger:
    """Request 2 heads the queue for this cause, beside one that runs and one that has ended under a deferral."""
    scene = Spoken()
    scene.arrive(1, [1, 2])
    scene.arrive(3, [3])
    scene.log.finished(3, Status.FINISHED_STOPPED)
    scene.log.free_deferred(3, [3], Holder.SESSION)
    scene.log.arrived(2, "r-2", 80, 8, 0, 20, 22)
    scene.log.queued(2, Cause.NEW)
    scene.log.allocation_failed(2, 20, 15)
    scene.log.not_scheduled(2, cause, 1)
    scene.say()
    return scene.ledger


def test_the_scheduler_s_resources_have_the_running_requests_as_holders() -> None:
    expected = {
        Cause.MAX_NUM_SEQS: "batch-slot",
        Cause.TOKEN_BUDGET: "token-budget",
        Cause.LORA: "lora-slot",
        Cause.ENCODER: "encoder-cache",
    }
    for cause, resource in expected.items():
        edge = edge_of(waiting_for(cause), "r-2")
        assert (edge.resource, [holder.name for holder in edge.holders]) == (resource, ["r-1"])
        assert edge.amount == (1 if resource == "batch-slot" else 0)
    blocks = edge_of(waiting_for(Cause.KV_BLOCKS), "r-2")
    assert (blocks.resource, blocks.amount) == ("kv-blocks", 5)
    assert [(holder.kind, holder.name, holder.blocks) for holder in blocks.holders] == [
        ("request", "r-1", 2),
        ("session", "r-3", 1),
    ]


def test_blocks_without_an_owner_never_move_and_a_connector_that_is_not_asked_does_not_either() -> None:
    leaky = unaccounted()
    leaky.lab.arrive(200, max_tokens=4, name="late")
    leaky.steps(20)
    moves = {holder.name: holder.moves for holder in edge_of(leaky.ledger, "late").holders}
    assert moves["no owner: UNACCOUNTED"] is False
    unpolled = leaks.idle_not_polled()
    unpolled.beat(12)
    graph = WaitGraph(unpolled.ledger)
    held = [graph.of_deferral(deferral) for deferral in unpolled.ledger.state.deferrals.values()]
    assert {(holder.unit, holder.moves) for holder in held} == {("polls", False)}
    assert min(holder.still_s for holder in held) > 10


def test_the_tree_says_for_how_long_a_connector_was_not_asked() -> None:
    scene = Watched(total=33, connector_share=1.0, faults=["leak.idle-not-polled"])
    scene.lab.arrive(40, max_tokens=4, name="ended")
    scene.run_until_idle()
    scene.beat(8)
    record = scene.ledger.request("ended")
    assert record is not None
    (keeper,) = wait_of(scene.ledger, record).waits_for
    assert "← not asked for" in keeper.text
    assert keeper.moves is False


def test_a_step_moves_until_it_takes_longer_than_any_before_it() -> None:
    scene = Watched()
    scene.lab.arrive(20, max_tokens=100)
    scene.steps(5, 2.0)
    scene.launch()
    scene.lab.arrive(8, name="late")
    scene.lab.flush()
    scene.beat(1)
    (step,) = edge_of(scene.ledger, "late").holders
    assert (step.kind, step.moves) == ("step", True)
    scene.beat(5)
    (step,) = edge_of(scene.ledger, "late").holders
    assert (step.kind, step.moves) == ("step", None)


def test_a_fetch_lasts_since_its_beginning_whatever_its_request_was_passed_over_for_since() -> None:
    scene = Spoken()
    scene.arrive(7, [3, 4])
    scene.log.waiting_on(7, Status.WAITING_FOR_REMOTE_KVS)
    scene.wait(5)
    scene.log.not_scheduled(7, Cause.KV_BLOCKS, 1)
    scene.wait(5)
    (connector,) = edge_of(scene.ledger, "r-7").holders
    assert (connector.unit, connector.still_s) == ("transfers", pytest.approx(10))
