"""corrupt.*: what the real pool never does, so an engine's words are made up."""

from __future__ import annotations

import pytest

from kvscope.monitor.contract.kinds import Holder, Kind, Limit, Release, Stage, Status
from kvscope.monitor.contract.wire import Run, batch_of
from kvscope.monitor.ledger import invariants
from kvscope.monitor.ledger.engine_ledger import MAX_ANOMALIES
from kvscope.monitor.ledger.pool_imbalance import find_imbalance
from tests.detectors.scenes import ENGINE, Spoken, value


def scene_with_two() -> Spoken:
    scene = Spoken()
    scene.arrive(1, [3, 4])
    scene.arrive(2, [5, 6])
    scene.say()
    return scene


def test_a_block_freed_twice() -> None:
    scene = scene_with_two()
    scene.log.released(1, [4, 3], Release.PREEMPTED)
    scene.wait(1)
    scene.log.released(1, [4], Release.FINISHED)
    scene.wait(1)
    finding = scene.only("corrupt.double-free")
    assert (finding.severity, finding.verdict) == ("critical", "confirmed")
    assert finding.culprits.blocks == [4]
    assert finding.culprits.requests == ["r-1"]
    history = [str(e.value) for e in finding.evidence if e.name == "block_history"]
    assert [line.partition(" ")[2] for line in history] == [
        "allocated to request r-1",
        "released by request r-1 (PREEMPTED)",
        "released by request r-1 (FINISHED)",
    ]


def test_a_block_freed_by_another_than_its_owner() -> None:
    scene = scene_with_two()
    scene.log.released(1, [5], Release.FINISHED)
    scene.wait(1)
    finding = scene.only("corrupt.double-free")
    assert finding.culprits.blocks == [5]
    assert finding.culprits.requests == ["r-1"]
    assert "owned by r-2" in finding.explanation


@pytest.mark.parametrize("owner_ended", [False, True])
def test_a_block_freed_by_another_is_in_use_when_handed_out_until_its_owner_ends(owner_ended: bool) -> None:
    scene = scene_with_two()
    scene.log.released(1, [5], Release.FINISHED)
    if owner_ended:
        scene.log.released(2, [6, 5], Release.FINISHED)
    scene.arrive(3, [5])
    scene.wait(1)
    (twice,) = scene.firing("corrupt.double-free")
    assert ("corrupt.use-after-free" in {effect.code for effect in twice.effects}) != owner_ended
    in_use = [finding for finding in scene.watch.findings("suppressed") if finding.code == "corrupt.use-after-free"]
    assert [(one.verdict, one.culprits.blocks) for one in in_use] == [] if owner_ended else [("confirmed", [5])]
    assert all("held by r-2" in one.explanation for one in in_use)


@pytest.mark.parametrize("complete", [False, True])
def test_a_block_is_kept_until_the_step_that_its_free_is_fenced_behind(complete: bool) -> None:
    scene = scene_with_two()
    scene.log.step_launched(7, [1, 2], [1, 1])
    scene.log.finished(1, Status.FINISHED_ABORTED)
    scene.log.detached(1, [3, 4])
    scene.log.free_deferred(1, [3, 4], Holder.FENCE, fence=7)
    if complete:
        scene.log.step_completed(7, 1_000_000, Limit.NONE, -1, -1, -1)
    scene.log.reclaimed([4, 3], Release.ABORTED)
    scene.arrive(3, [4])
    scene.wait(1)
    found = scene.firing("corrupt.use-after-free")
    assert bool(found) != complete
    assert all("step 7" in one.explanation and "only reads a block does no harm" in one.explanation for one in found)


def test_a_block_reclaimed_that_was_never_detached() -> None:
    scene = scene_with_two()
    scene.log.reclaimed([5], Release.TRANSFER_DONE)
    scene.wait(1)
    assert scene.only("corrupt.double-free").culprits.blocks == [5]


def test_a_block_handed_out_while_it_is_held() -> None:
    scene = scene_with_two()
    scene.log.allocated(2, [7, 3])
    scene.wait(1)
    finding = scene.only("corrupt.use-after-free")
    assert (finding.severity, finding.verdict) == ("critical", "confirmed")
    assert finding.culprits.blocks == [3]
    assert finding.culprits.requests == ["r-2"]
    assert "held by r-1" in finding.explanation


@pytest.mark.parametrize("again", [False, True])
def test_a_block_freed_once_too_often_is_handed_out_in_use_only_to_a_second_one(again: bool) -> None:
    """The engine's audit has a count below 0 then: nobody holds the block, and the next request may have it."""
    scene = scene_with_two()
    scene.log.released(1, [4, 3], Release.FINISHED)
    scene.log.released(1, [4], Release.FINISHED)
    audit(scene, tables={2: [5, 6]}, refs={4: -1, 5: 1, 6: 1})
    scene.log.allocated(2, [4])
    if again:
        scene.arrive(3, [4])
    scene.wait(1)
    found = {finding.code: finding for finding in scene.firing()}
    effects = {effect.code for finding in scene.firing() for effect in finding.effects}
    assert "corrupt.double-free" in found
    assert ("corrupt.use-after-free" in {*found, *effects}) == again


@pytest.mark.parametrize(
    ("wrong", "severity"),
    [
        ((29, 0, 4, 33), "critical"),
        ((28, 1, 4, 33), "critical"),
        ((28, 0, 3, 33), "critical"),
        ((27, 0, 4, 33), "error"),
        ((28, 0, 5, 33), "error"),
    ],
)
def test_counts_that_disagree_with_the_events(wrong: tuple[int, int, int, int], severity: str) -> None:
    """With fewer free than the events show, no block is handed out too early: the answers are not in doubt."""
    scene = scene_with_two()
    scene.say((28, 0, 4, 33))
    assert not scene.firing()
    scene.say(wrong)
    finding = scene.only("corrupt.counter-drift")
    assert (finding.severity, finding.verdict) == (severity, "confirmed")
    assert value(finding, "anomalies") == 1
    assert ("does not show that two requests share a block" in finding.explanation) == (severity == "error")
    assert ("mix requests" in " ".join(finding.do_now)) == (severity == "critical")


def test_counts_that_are_wrong_in_both_directions_leave_the_answers_in_doubt() -> None:
    scene = scene_with_two()
    for counts in ((27, 0, 4, 33), (29, 0, 4, 33)):
        scene.say(counts)
    finding = scene.only("corrupt.counter-drift")
    assert (finding.severity, value(finding, "anomalies")) == ("critical", 2)
    assert "KV of another" in finding.explanation


def audit(
    scene: Spoken,
    refs_of_5: int = 1,
    tables: dict[int, list[int]] | None = None,
    refs: dict[int, int] | None = None,
) -> None:
    """The engine reads its tables out: r-1 with 3 and 4, r-2 with 5 and 6, all else free, unless told."""
    held = {3: 1, 4: 1, 5: refs_of_5, 6: 1} if refs is None else refs
    scene.log.audit_begin(1)
    scene.log.audit_blocks(1, [held.get(b, 0) * 4 + (0 if b in held else 2) for b in range(1, scene.total)])
    tables = {1: [3, 4], 2: [5, 6]} if tables is None else tables
    for number, blocks in tables.items():
        scene.log.audit_request(number, f"r-{number}", Status.RUNNING, 0, 0, blocks)
    scene.log.audit_end(1, 28, 0, 4, len(tables))
    scene.wait(1)


def test_an_audit_that_agrees_finds_nothing() -> None:
    scene = scene_with_two()
    audit(scene)
    assert scene.ledger.state.audit_cycles == 1
    assert not scene.alarms()


def test_an_audit_that_finds_another_reference_count() -> None:
    """A reference that no event ever spoke of: found by the audit, and then unaccounted for too."""
    scene = scene_with_two()
    audit(scene, refs_of_5=2)
    (drift,) = scene.firing("corrupt.counter-drift")
    assert drift.culprits.blocks == [5]
    assert "reference count 2" in drift.explanation
    assert scene.ledger.state.unexplained_references() == {5: 1}


def test_an_audit_that_finds_another_block_table() -> None:
    scene = scene_with_two()
    audit(scene, tables={1: [3, 4], 2: [5, 6, 3]})
    finding = scene.only("corrupt.counter-drift")
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-2"], [3])


def test_a_table_that_lost_blocks_without_a_free() -> None:
    """One finding, with the request and its blocks, while it runs on and when it has ended."""
    scene = scene_with_two()
    audit(scene, tables={1: [3, 4], 2: []})
    audit(scene, tables={1: [3, 4], 2: []})
    for _ in range(2):
        scene.wait(3)
        finding = scene.only("leak.unaccounted")
        assert finding.verdict == "confirmed"
        assert (finding.culprits.requests, finding.culprits.blocks) == (["r-2"], [5, 6])
        assert "block table of r-2 lost them" in finding.explanation
        assert scene.ledger.balance().unaccounted == 2
        if 2 in scene.ledger.state.requests:
            scene.log.finished(2, Status.FINISHED_STOPPED)
    scene.log.released(2, [5, 6], Release.FINISHED)  # late, and rightful
    scene.wait(3)
    assert not scene.firing()
    assert not scene.ledger.anomalies


def test_a_request_that_the_engine_forgot_is_lost() -> None:
    scene = scene_with_two()
    for _ in range(3):
        audit(scene, tables={1: [3, 4]})
    finding = scene.only("stuck.lost-request")
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-2"], [5, 6])


def test_what_one_event_breaks_at_many_blocks_is_told_once() -> None:
    scene = Spoken(1200)
    scene.arrive(1, [1])
    scene.arrive(2, [*range(2, 1002)])
    scene.log.released(1, [*range(2, 1002)], Release.FINISHED, group=1)
    scene.wait(1)
    finding = scene.only("corrupt.double-free")
    assert value(finding, "anomalies") == 1
    assert finding.culprits.blocks == [*range(2, 1002)]
    assert "KV group 1, released by another than its owner (owned by r-2)" in finding.explanation


def test_after_a_loss_it_is_only_likely() -> None:
    scene = scene_with_two()
    scene.log.released(1, [4, 3], Release.FINISHED)
    scene.log.released(1, [4], Release.FINISHED)
    scene.wait(1)
    scene.watch.feed([batch_of(ENGINE, scene.packer.epoch, [Run(Kind.LOST, 0, -1, [9, 9, Stage.TRANSPORT], [])])])
    scene.watch.settle()
    finding = scene.only("corrupt.double-free")
    assert finding.verdict == "likely"
    assert finding.missing


def test_who_is_given_a_block_after_it_went_wrong_is_no_culprit() -> None:
    scene = scene_with_two()
    scene.log.released(1, [4, 3], Release.FINISHED)
    scene.log.released(1, [4], Release.FINISHED)
    scene.log.allocated(2, [4])
    scene.log.released(2, [4], Release.FINISHED)
    scene.log.released(2, [4], Release.FINISHED)
    scene.wait(1)
    finding = scene.only("corrupt.double-free")
    assert (finding.culprits.requests, finding.culprits.blocks) == (["r-1"], [4])
    assert value(finding, "anomalies") == 1


def test_what_went_wrong_first_is_remembered_however_much_follows() -> None:
    scene = scene_with_two()
    scene.log.released(1, [4, 4], Release.FINISHED)
    scene.wait(1)
    since = scene.only("corrupt.double-free").since
    for number in range(2 * MAX_ANOMALIES):
        scene.log.released(1, [4], Release.FINISHED)
        if number % 100 == 99:
            scene.say()
    assert len(scene.ledger.anomalies) == MAX_ANOMALIES
    scene.wait(1)
    assert [finding.since for finding in scene.firing("corrupt.double-free")] == [since]


def scene_that_does_not_add_up() -> Spoken:
    """The ledger itself is damaged, since no engine can bring that about: block 5 has a reference and no owner."""
    scene = scene_with_two()
    scene.wait(1)
    lose_owner(scene, 5)
    return scene


def lose_owner(scene: Spoken, block: int) -> None:
    state = scene.ledger.state
    state.owner[block] = -1
    state.requests[2].blocks.remove(block)
    scene.log.cached(1, [3], [103])  # an event about blocks, after which the pool is added up anew


@pytest.fixture
def no_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ledger go on whose state is impossible."""
    monkeypatch.setenv(invariants.VARIABLE, "0")


@pytest.mark.usefixtures("no_validation")
def test_a_pool_that_does_not_add_up() -> None:
    scene = scene_that_does_not_add_up()
    assert not scene.firing()
    scene.wait(1)
    finding = scene.only("corrupt.conservation")
    assert (finding.severity, finding.verdict) == ("critical", "confirmed")
    assert finding.culprits.blocks == [5]
    assert value(finding, "difference") == -1
    assert (value(finding, "pool_blocks"), value(finding, "counted_blocks")) == (33, 32)
    assert [str(e.value).partition(" ")[2] for e in finding.evidence if e.name == "block_history"] == [
        "allocated to request r-2"
    ]
    since = finding.since
    scene.wait(30)
    assert scene.only("corrupt.conservation").since == since


@pytest.mark.usefixtures("no_validation")
def test_a_lost_batch_explains_a_pool_that_does_not_add_up() -> None:
    scene = scene_that_does_not_add_up()
    scene.packer.next_sequence += 1
    for _ in range(60):
        scene.wait(1)
    assert scene.ledger.state.damaged
    assert "corrupt.conservation" not in scene.alarms()


@pytest.mark.usefixtures("no_validation")
def test_a_pool_that_adds_up_again_after_an_audit() -> None:
    scene = scene_that_does_not_add_up()
    scene.packer.next_sequence += 1
    scene.wait(1)
    audit(scene, 0, {1: [3, 4], 2: [6]})
    scene.wait(1)
    assert not scene.ledger.state.damaged
    assert scene.ledger.balance().holds
    assert "corrupt.conservation" not in scene.alarms()


@pytest.mark.usefixtures("no_validation")
def test_an_imbalance_after_a_loss_began_after_it() -> None:
    """An audit had made the pool add up again."""
    scene = scene_that_does_not_add_up()
    scene.packer.next_sequence += 1
    scene.wait(1)
    audit(scene, 0, {1: [3, 4], 2: [6]})
    scene.wait(1)
    lost_ns = scene.ledger.losses[-1].at_ns
    lose_owner(scene, 6)
    scene.wait(1)
    scene.wait(1)
    imbalance = find_imbalance(scene.ledger)
    assert imbalance is not None
    assert imbalance.blocks == [6]
    assert lost_ns < imbalance.since_ns < scene.ledger.now_ns


def test_a_pool_adds_up_after_a_block_was_freed_twice() -> None:
    scene = scene_with_two()
    scene.log.released(1, [5], Release.FINISHED)
    scene.wait(1)
    assert scene.ledger.balance().holds
    assert not scene.only("corrupt.double-free").effects
