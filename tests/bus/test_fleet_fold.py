"""The fold of the streams: whatever the order and however often, the same fleet."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvscope.monitor.bus.bus_messages import encode_message, finding_message
from kvscope.monitor.bus.fleet_fold import FleetFold
from tests.bus.test_bus_messages import points
from tests.finding_transitions import ENGINE, AlertMessages


@pytest.mark.parametrize("seed", range(5))
def test_the_order_and_repetitions_change_nothing(seed: int) -> None:
    received_alerts = AlertMessages()
    reported = (
        received_alerts.fire(1)
        + received_alerts.end(9)
        + received_alerts.fire(20)
        + received_alerts.fire(21, "stuck.zero-token")
    )
    (point,) = points()
    older = msgspec.structs.replace(point, at_ns=0, open=["older"])
    payloads = [("finding", encode_message(finding_message(each, "a"))) for each in reported]
    payloads += [("point", encode_message(each)) for each in (point, older)]
    drawn = random.Random(seed)
    shuffled = payloads * 3
    drawn.shuffle(shuffled)
    fold = FleetFold()
    for kind, payload in shuffled:
        assert fold.take(kind, payload) is not None
    assert {each.id for each in fold.open_findings()} == {reported[2].finding.id, reported[3].finding.id}
    assert [each.id for each in fold.resolved_findings()] == [reported[0].finding.id]
    (engine,) = fold.engines().values()
    assert engine.point.at_ns == point.at_ns
    assert engine.missing == point.open
    assert {each.id for each in fold.open_findings(ENGINE)} == {reported[2].finding.id, reported[3].finding.id}


def test_what_cannot_be_read_is_counted_with_its_reason_and_the_rest_is_folded() -> None:
    (fired,) = AlertMessages().fire(1)
    payload = encode_message(finding_message(fired, "agent-9"))
    fold = FleetFold()
    newer = payload.replace(b'"major":1', b'"major":2')
    for _ in range(3):
        assert fold.take("finding", newer) is None
    for number in range(50):
        fold.take("point", b"{%d" % number)
    fold.take("finding", payload)
    assert fold.unreadable_total == 53
    assert len(fold.unreadable) <= 20
    assert len(fold.open_findings()) == 1


def test_a_code_of_a_newer_release_is_open_and_not_described() -> None:
    (fired,) = AlertMessages().fire(1)
    payload = encode_message(finding_message(fired, "a")).replace(b"leak.finished-held", b"leak.of-tomorrow")
    fold = FleetFold()
    fold.take("finding", payload)
    assert fold.open_findings() == []
    assert fold.open_ids() == {fired.finding.id}


def test_the_oldest_resolved_findings_go_first_and_open_ones_stay() -> None:
    fold = FleetFold(most_findings=10)
    received_alerts = AlertMessages()
    for second in range(0, 400, 10):
        for transition in received_alerts.fire(second) + received_alerts.end(second + 2):
            fold.apply(finding_message(transition, "a"))
    (fired,) = received_alerts.fire(1_000)
    fold.apply(finding_message(fired, "a"))
    assert len(fold.resolved_findings()) == 9
    assert [each.id for each in fold.open_findings()] == [fired.finding.id]
