"""The fold of the streams: the owner's words count, in the order of the stream, however often they come."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvscope.monitor.detectors.findings import Transition
from kvscope.monitor.fleet.bus_messages import FindingMessage, PointMessage, encode_message, finding_message
from kvscope.monitor.fleet.fleet_fold import UNLISTED_S, FleetFold
from kvscope.monitor.fleet.fleet_owners import OWNER_SILENT_S, EngineOwner, FleetOwners
from tests.finding_transitions import ENGINE, AlertMessages
from tests.fleet.stored import stored
from tests.fleet.test_bus_messages import points


def point_of(agent: str, *open: str, engine: str = ENGINE, running: int = 0) -> PointMessage:
    (point,) = points()
    view = msgspec.structs.replace(point.engine, engine=engine, running=running)
    return msgspec.structs.replace(
        point, id=f"{agent}-{running}", agent=agent, at_ns=time.time_ns(), engine=view, open=list(open)
    )


def fired(agent: str = "a", **fields: str) -> FindingMessage:
    (transition,) = AlertMessages().fire(time.time(), **fields)
    return finding_message(transition, agent)


def resolved(message: FindingMessage, agent: str) -> FindingMessage:
    finding = message.transition.finding()
    finding.state, finding.resolved_ns = "resolved", time.time_ns()
    return finding_message(Transition(finding, "resolved", finding.resolved_ns), agent)


def released(fold: FleetFold) -> list[tuple[str, str]]:
    return [(told.message.transition.id, told.message.transition.to) for told in fold.take_released()]


def test_what_comes_again_changes_nothing() -> None:
    received_alerts = AlertMessages()
    reported = (
        received_alerts.fire(1)
        + received_alerts.end(9)
        + received_alerts.fire(700)  # too late to be the same
        + received_alerts.fire(701, "stuck.zero-token")
    )
    messages = [stored(finding_message(each, "a"), number) for number, each in enumerate(reported, 1)]
    messages += [stored(point_of("a", running=number), number) for number in (1, 2)]
    fold = FleetFold()
    for after in range(1, len(messages) + 1):  # each time the reader begins anew
        for message in messages[:after]:
            fold.take(message)
    assert {each.id for each in fold.open_findings(ENGINE)} == {reported[2].finding.id, reported[3].finding.id}
    assert [each.id for each in fold.resolved_findings()] == [reported[0].finding.id]
    assert fold.engines()[ENGINE].point.engine.running == 2


def test_one_that_returns_is_the_finding_before_however_often_the_stream_is_read() -> None:
    received_alerts = AlertMessages()
    reported = [received_alerts.fire(1), received_alerts.end(9), received_alerts.fire(20), received_alerts.end(29)]
    messages = [stored(finding_message(each, "a"), number) for number, (each,) in enumerate(reported, 1)]
    ((first,), *_) = reported
    fold = FleetFold()
    for after in range(1, len(messages) + 1):
        for message in messages[:after]:
            fold.take(message)
        listed = fold.open_findings(ENGINE) if after % 2 else fold.resolved_findings()
        assert [(each.id, len(each.earlier)) for each in listed] == [(first.finding.id, int(after > 2))]
        assert len(fold.open_findings(ENGINE)) + len(fold.resolved_findings()) == 1


def test_what_cannot_be_read_is_counted_with_its_reason_and_the_rest_is_folded() -> None:
    message = stored(fired("agent-9"), 1)
    fold = FleetFold()
    for _ in range(3):
        assert fold.take(message._replace(body=message.body.replace(b'"major":1', b'"major":2'))) is None
    for number in range(50):
        fold.take(stored(point_of("a"), 1)._replace(body=b"{%d" % number))
    fold.take(message)
    assert fold.unreadable_total == 53
    assert len(fold.unreadable) <= 20
    assert len(fold.open_findings()) == 1


def test_a_code_of_a_newer_release_is_open_and_not_described() -> None:
    message = stored(fired(), 1)
    fold = FleetFold()
    fold.take(message._replace(body=message.body.replace(b"leak.finished-held", b"leak.of-tomorrow")))
    assert fold.open_findings() == []
    assert len(fold.open_ids()) == 1


def test_beyond_the_bound_the_agent_that_sent_the_most_loses_its_oldest() -> None:
    fold = FleetFold(most_findings=10)
    other = fired("b", engine="other@127.0.0.1:2/0")
    fold.take(stored(other, 1))
    received_alerts = AlertMessages()
    sequence = 2
    for second in range(0, 40_000, 1_000):  # each too late to be the one before
        for transition in received_alerts.fire(second) + received_alerts.end(second + 2):
            fold.take(stored(finding_message(transition, "a"), sequence))
            sequence += 1
    (last,) = received_alerts.fire(41_000)
    fold.take(stored(finding_message(last, "a"), sequence))
    assert len(fold.resolved_findings()) == 8
    assert {each.id for each in fold.open_findings()} == {last.finding.id, other.transition.id}


# ---------------------------------------------------------------- who owns an engine


def test_a_thief_resolves_forges_and_describes_nothing() -> None:
    fold, own = FleetFold(), fired("a")
    fold.take(stored(point_of("a", own.transition.id, running=3), 1))
    fold.take(stored(own, 1))
    forged = fired("thief", code="corrupt.double-free")
    for sequence, message in enumerate((resolved(own, "thief"), forged), 2):
        assert fold.take(stored(message, sequence)) is None
    assert fold.take(stored(point_of("thief", running=9), 2)) is None
    assert fold.owners.owner(ENGINE) == "a"
    assert fold.points[ENGINE].engine.running == 3
    assert [each.id for each in fold.open_findings()] == [own.transition.id]
    assert released(fold) == []
    assert fold.owners.refused["not-owner"] == 3
    (refusal,) = fold.owners.refusals(0.0)
    assert (refusal.agent, refusal.owner, refusal.engine) == ("thief", "a", ENGINE)


@pytest.mark.parametrize("kind", ["point", "finding"])
def test_a_message_that_names_another_agent_or_engine_than_its_subject_is_unreadable(kind: str) -> None:
    message = point_of("a") if kind == "point" else fired("a")
    fold = FleetFold()
    assert fold.take(stored(message, 1, agent="thief")) is None
    elsewhere = stored(message, 2)
    subject = elsewhere.subject.replace("a@127", "b@127")
    assert fold.take(elsewhere._replace(subject=subject)) is None
    assert fold.unreadable_total == 2
    assert fold.owners.owner(ENGINE) == ""


def test_the_next_holder_of_a_lease_goes_on_at_once_and_what_it_does_not_list_is_over() -> None:
    fold, kept, left = FleetFold(), fired("a"), fired("a", code="stuck.zero-token")
    fold.take_lease("engine.1", "a", [ENGINE], time.monotonic())
    fold.take(stored(point_of("a", kept.transition.id, left.transition.id), 1, ago_s=UNLISTED_S + 1, is_backlog=True))
    for sequence, message in enumerate((kept, left), 1):
        fold.take(stored(message, sequence, ago_s=UNLISTED_S + 1, is_backlog=True))
    fold.take_lease("engine.2", "thief", [ENGINE], time.monotonic())  # another lease
    assert fold.owners.owner(ENGINE) == "a"
    fold.take_lease("engine.1", "b", [ENGINE], time.monotonic())
    assert fold.owners.owner(ENGINE) == "b"
    assert fold.open_ids() == {kept.transition.id, left.transition.id}
    fold.take(stored(point_of("b", kept.transition.id), 2))
    assert fold.open_ids() == {kept.transition.id}
    assert released(fold) == [(left.transition.id, "resolved")]
    fold.take(stored(resolved(kept, "a"), 3))  # too late: it is the other's
    assert fold.open_ids() == {kept.transition.id}
    assert fold.take(stored(resolved(kept, "b"), 4)) is not None
    assert fold.open_ids() == set()
    assert fold.owners.refused["not-owner"] == 1  # the lease: the last owner's message was on its way


def test_without_leases_another_agent_is_believed_once_the_first_is_silent() -> None:
    fold, early = FleetFold(), fired("b")
    fold.take(stored(point_of("a"), 1, ago_s=OWNER_SILENT_S - 5, is_backlog=True))
    assert fold.take(stored(early, 1)) is None
    assert fold.take(stored(point_of("b"), 2)) is None
    fold = FleetFold()
    fold.take(stored(point_of("a"), 1, ago_s=OWNER_SILENT_S + 5, is_backlog=True))
    assert fold.take(stored(early, 1)) is None
    assert fold.take(stored(point_of("b", early.transition.id), 2)) is not None
    assert fold.owners.owner(ENGINE) == "b"
    assert released(fold) == [(early.transition.id, "firing")]
    assert fold.open_ids() == {early.transition.id}


def test_a_hub_that_starts_knows_the_owner_from_the_hubs_before_it() -> None:
    """The streams alone show two agents that describe an engine, and not which of them was there first."""
    own, adopted = fired("a"), fired("before", code="stuck.zero-token")
    fold = FleetFold()
    fold.take_owner(EngineOwner(ENGINE, "a", before=["before"]), time.monotonic())
    forged = fired("thief", code="corrupt.double-free")
    messages = [adopted, own, resolved(own, "thief"), resolved(adopted, "thief"), forged]
    for sequence, message in enumerate(messages, 1):
        fold.take(stored(message, sequence, ago_s=60, is_backlog=True))
    fold.take(stored(point_of("thief", forged.transition.id), 1, is_backlog=True))
    fold.take(stored(point_of("a", own.transition.id, adopted.transition.id), 2, is_backlog=True))
    assert fold.open_ids() == {own.transition.id, adopted.transition.id}
    assert released(fold) == [(adopted.transition.id, "firing")]
    assert fold.owners.take_unwritten() == []


def test_an_agent_that_takes_over_believes_the_last_holder_alone() -> None:
    own, forged = fired("last"), fired("thief", code="corrupt.double-free")
    fold = FleetFold(FleetOwners(fixed="last"))
    fold.take(stored(point_of("last", own.transition.id, running=4), 1, is_backlog=True))
    for sequence, message in enumerate((own, forged, resolved(own, "thief")), 1):
        fold.take(stored(message, sequence, is_backlog=True))
    assert fold.open_ids() == {own.transition.id}


# ---------------------------------------------------------------- bounds


def test_ghost_engines_are_refused_beyond_the_bounds_and_room_is_made_by_what_is_gone() -> None:
    owners = FleetOwners(most_engines=6, most_of_agent=4)
    now_s = time.monotonic()
    for number in range(5):
        assert owners.describe(f"ghost-{number}", "thief", now_s) == (number < 4)
    assert owners.describe("e-1", "a", now_s)
    assert owners.tell("e-2", "b", now_s)
    assert not owners.describe("e-3", "c", now_s)
    assert owners.take_lease("engine.1", "d", ["e-4"], now_s) == []
    assert owners.refused == {"agent-full": 1, "tenant-full": 2}
    assert {each.reason for each in owners.refusals(now_s - 1)} == {"agent-full", "tenant-full"}
    assert owners.describe("e-1", "a", now_s + 1_000)  # still there, and everything else is gone
    assert owners.describe("e-3", "c", now_s + 1_000)
    assert owners.describe("e-4", "c", now_s + 1_000)
    assert owners.owner("e-1") == "a"
    assert len(owners.take_dropped()) == 2
    assert sum(map(len, owners.engines().values())) == 6


def test_a_forged_message_too_long_for_its_subject_is_read_by_its_hash() -> None:
    engine = "e" * 300
    message = point_of("a" * 250, engine=engine)
    fold = FleetFold()
    assert fold.take(stored(message, 1)) is not None
    assert fold.owners.owner(engine) == "a" * 250
    assert encode_message(message)
