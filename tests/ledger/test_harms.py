"""Who is harmed, by facts alone: what the fold keeps of a request that is sent back, and who overtook whom."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Cause, Holder, Preempt, Status
from kvscope.monitor.ledger.harms import computed_again, held_without_progress, overtaken, unserved, without_progress
from tests.detectors.spoken import Spoken


class Queue(Spoken):
    """Requests of 16 tokens that arrive a second apart."""

    def queue(self, number: int, priority: int = 0) -> None:
        self.clock.sleep(1)
        self.log.tick()
        self.log.arrived(number, f"r-{number}", 16, 8, priority, 4, 6)
        self.say()

    def admit(self, number: int) -> None:
        self.clock.sleep(1)
        self.log.tick()
        self.log.admitted(number, 0)
        self.say()

    def progress(self, number: int, *computed: int, outputs: int = 0) -> None:
        for tokens in computed:
            self.clock.sleep(1)
            self.log.tick()
            self.log.progressed([number], [tokens], [outputs])
        self.say()


@pytest.mark.parametrize(
    ("computed", "outputs", "reached"),
    [
        ([8, 12, 0], 0, 12),
        ([8, 12, 0, 8, 12], 0, 12),
        ([8, 12, 0, 8, 13], 0, 0),
        ([8, 12, 12], 0, 0),
        # Four drafts beyond its 16 tokens of prompt and 3 of output were rejected; a step later one of its own is lost.
        ([22, 18], 3, 0),
        ([22, 17], 3, 18),
    ],
)
def test_a_request_is_computed_again_until_it_comes_further(computed: list[int], outputs: int, reached: int) -> None:
    scene = Queue()
    scene.queue(1)
    scene.admit(1)
    scene.progress(1, 1, outputs=outputs)
    scene.progress(1, *computed, outputs=outputs)
    again = list(computed_again(scene.ledger))
    assert [each.record.reached_tokens for each in again] == ([reached] if reached else [])


def test_what_a_preemption_loses_is_not_computed_again_for_an_unknown_cause() -> None:
    scene = Queue()
    scene.queue(1)
    scene.admit(1)
    scene.progress(1, 8, 12, 4)
    assert len(list(computed_again(scene.ledger))) == 1
    scene.log.preempted(1, Preempt.KV_BLOCKS, -1, 0, 4)
    scene.admit(1)
    scene.progress(1, 4)
    assert not list(computed_again(scene.ledger))


def test_those_that_arrived_later_and_were_admitted_overtake_even_after_their_end() -> None:
    scene = Queue()
    for number, priority in ((1, 0), (2, 5), (3, 0), (4, 9), (5, 0)):
        scene.queue(number, priority)
    for number in (1, 4, 5):
        scene.admit(number)
    first_ns = scene.ledger.request("r-4").admitted_ns  # type: ignore[union-attr]
    scene.log.finished(4, Status.FINISHED_STOPPED)
    scene.say()
    found = {each.record.id: each for each in overtaken(scene.ledger)}
    assert {name: (each.overtakers, each.alike) for name, each in found.items()} == {"r-2": (2, 1), "r-3": (2, 2)}
    assert {each.since_ns for each in found.values()} == {first_ns}


def test_a_wait_for_something_outside_the_scheduler_is_no_place_in_the_queue() -> None:
    scene = Queue()
    scene.queue(1)
    scene.log.waiting_on(1, Status.WAITING_FOR_REMOTE_KVS)
    scene.queue(2)
    scene.admit(2)
    assert not list(overtaken(scene.ledger))
    assert not list(unserved(scene.ledger))
    scene.log.ready(1)
    scene.say()
    assert not list(overtaken(scene.ledger)), "those admitted while it fetched did not overtake it"
    scene.queue(3)
    scene.admit(3)
    assert [each.record.id for each in overtaken(scene.ledger)] == ["r-1"]


@pytest.mark.parametrize("reason", [Cause.LORA, Cause.ENCODER, Cause.CONNECTOR])
def test_one_may_have_lacked_what_the_first_lacks_until_a_reason_was_told(reason: Cause) -> None:
    """An engine tells it of the first alone: those behind it are new to the monitor meanwhile."""
    scene = Queue()
    scene.queue(1)
    scene.log.not_scheduled(1, reason, 1)
    scene.queue(2)
    scene.queue(3)
    scene.admit(3)
    scene.log.not_scheduled(2, Cause.TOKEN_BUDGET, 1)
    scene.say()
    assert not list(overtaken(scene.ledger))
    scene.queue(4)
    scene.admit(4)
    assert [each.record.id for each in overtaken(scene.ledger)] == ["r-2"]


@pytest.mark.parametrize("reason", [Cause.LORA, Cause.ENCODER, Cause.CONNECTOR])
def test_those_that_pass_a_request_that_lacks_something_of_its_own_do_not_overtake_it(reason: Cause) -> None:
    scene = Queue()
    scene.queue(1)
    scene.log.not_scheduled(1, reason, 1)
    scene.queue(2)
    scene.admit(2)
    assert not list(overtaken(scene.ledger))
    scene.log.not_scheduled(1, Cause.TOKEN_BUDGET, 1)
    scene.say()
    assert not list(overtaken(scene.ledger))
    scene.queue(3)
    scene.admit(3)
    assert [(each.record.id, each.overtakers) for each in overtaken(scene.ledger)] == [("r-1", 1)]


def test_requests_are_unserved_if_nothing_runs_or_the_places_are_not_taken() -> None:
    scene = Queue(max_num_seqs=2)
    scene.queue(1)
    scene.queue(2)
    assert [each.record.id for each in unserved(scene.ledger)] == ["r-1", "r-2"]
    scene.admit(1)
    assert not list(unserved(scene.ledger)), "it has not been passed over"
    scene.log.not_scheduled(2, Cause.MAX_NUM_SEQS, 8)
    scene.say()
    assert [each.record.id for each in unserved(scene.ledger)] == ["r-2"]
    scene.queue(3)
    scene.admit(3)
    assert not list(unserved(scene.ledger)), "both places are taken"


def test_blocks_of_a_request_that_gets_tokens_are_not_held_in_vain() -> None:
    scene = Spoken()
    scene.arrive(1, [1, 2, 3])
    scene.arrive(2, [4, 5])
    scene.wait(60)
    scene.log.progressed([1], [4], [0])
    scene.say()
    until_ns = scene.ledger.state.now_ns - 30_000_000_000
    assert held_without_progress(scene.ledger, until_ns, least=2).keys() == {4, 5}
    assert not held_without_progress(scene.ledger, until_ns, least=3)
    last = {each.record.id: each.since_ns for each in without_progress(scene.ledger)}
    assert last["r-1"] - last["r-2"] >= 60_000_000_000
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.say()
    held = held_without_progress(scene.ledger, until_ns, least=2)
    assert held.keys() == {4, 5}, "its blocks may go with the next event"
    scene.log.progressed([2], [4], [0])
    scene.say()
    token_ns = scene.ledger.state.now_ns
    scene.wait(60)
    held = held_without_progress(scene.ledger, scene.ledger.state.now_ns, least=2)
    assert {held[4], held[5]} == {token_ns}, "until then they were used"


def test_blocks_that_a_transfer_keeps_or_brings_are_judged_by_how_long_transfers_take() -> None:
    scene = Spoken()
    scene.arrive(1, [1, 2, 3])
    scene.arrive(2, [4, 5])
    scene.log.waiting_on(2, Status.WAITING_FOR_REMOTE_KVS)
    scene.log.finished(1, Status.FINISHED_STOPPED)
    scene.log.free_deferred(1, [1, 2, 3], Holder.CONNECTOR)
    scene.say()
    scene.wait(60)
    assert not held_without_progress(scene.ledger, scene.ledger.state.now_ns, least=1)
