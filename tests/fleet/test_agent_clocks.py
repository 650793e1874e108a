"""A hub beside agents whose clocks are off by an hour, a day or two centuries: at each place where a time that an agent
wrote could be compared, nothing is stale, and nothing stays open for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from kvscope.monitor.base.text import timestamp
from kvscope.monitor.detectors.findings import Findings
from kvscope.monitor.fleet.agent_clocks import BEHIND_AFTER_S
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import StreamMessage
from kvscope.monitor.fleet.bus_messages import AnnotationMessage, FindingMessage, PointMessage
from kvscope.monitor.fleet.fleet_owners import OWNER_SILENT_S
from kvscope.monitor.fleet.hub_lease import HubRecord, SentUpTo
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.service.fleet_query import LATE_AGENT_S
from kvscope.monitor.service.hub_server import Hub, HubConfig
from tests.finding_transitions import ENGINE
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import bus_config_of, one_server, set_up
from tests.fleet.stored import publish, stored
from tests.fleet.test_fleet_fold import fired, point_of, resolved
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
HOUR, DAY = 3_600.0, 86_400.0
YEAR_2262: Final = (2**63 - 1) / 1e9
OFFSETS: Final = {
    "an hour ahead": HOUR,
    "an hour behind": -HOUR,
    "a day ahead": DAY,
    "a day behind": -DAY,
    "in the year 2262": YEAR_2262 - time.time() - 60,
}


class WrongClock:
    """An agent's messages as they reach a hub, written by a clock that is off by `ahead_s`."""

    def __init__(self, hub: Hub, ahead_s: float) -> None:
        self._hub = hub
        self.ahead_s = ahead_s
        self._sequence = 0

    def _off(self, at_ns: int) -> int:
        return at_ns + round(self.ahead_s * 1e9) if at_ns else 0

    def hand(self, message: PointMessage | FindingMessage | AnnotationMessage, ago_s: float = 0.0) -> StreamMessage:
        """Store a message, this long ago, and let the hub read it."""
        self._sequence += 1
        if isinstance(message, FindingMessage):
            told = message.transition
            judged = msgspec.structs.replace(told.judgement, since_ns=self._off(told.judgement.since_ns))
            times = {name: self._off(getattr(told, name)) for name in ("at_ns", "fired_ns", "resolved_ns")}
            wrong = msgspec.structs.replace(
                message, transition=msgspec.structs.replace(told, judgement=judged, **times)
            )
        else:
            wrong = msgspec.structs.replace(message, at_ns=self._off(message.at_ns))
        received = stored(wrong, self._sequence, ago_s=ago_s, ahead_s=self.ahead_s, is_backlog=ago_s > 0)
        self._hub.link._take(received)
        return received


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that has read what is stored, and holds no lease yet."""
    alerts = AlertsConfig(("http://127.0.0.1:1/alerts",), allow_private=True)
    made = Hub(HubConfig(BusConfig(("nats://127.0.0.1:1",), agent="hub", role="hub"), alerts=alerts))
    made.link._caught_up = dict.fromkeys(made.link._caught_up, True)
    try:
        yield made
    finally:
        made.alerts.close()
        made.query.close()


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_the_latest_point_is_shown_and_its_age_is_that_of_its_receipt(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    agent.hand(point_of("a", running=1), ago_s=LATE_AGENT_S + 60)
    assert hub.query.engines()[0].status == "unknown"  # and never "serving", whatever the clock of its agent
    agent.hand(point_of("a", running=2))
    (view,) = hub.query.engines()
    assert (view.running, view.status) == (2, point_of("a").engine.status)
    assert hub.query.fleet_overview().engines[0].age_s < 5
    assert hub.link.agent_age_s("a") < 5
    agent.ahead_s = 0.0  # the clock is right again: what is newer counts at once
    agent.hand(point_of("a", running=3))
    assert hub.query.engines()[0].running == 3
    agent.ahead_s = ahead_s
    agent.hand(point_of("a", running=4))
    assert hub.query.engines()[0].running == 4


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_a_finding_that_is_over_is_over_whenever_the_clock_moved(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    for first_s, then_s in ((ahead_s, 0.0), (0.0, ahead_s), (ahead_s, ahead_s)):
        found = fired("a")
        agent.ahead_s = first_s
        agent.hand(found)
        agent.hand(point_of("a", found.transition.id))
        assert [each.id for each in hub.query.findings("firing", ENGINE)] == [found.transition.id]
        assert hub.query.fleet_overview().engines[0].codes
        agent.ahead_s = then_s
        agent.hand(resolved(found, "a"))
        assert hub.query.findings("firing", ENGINE) == []
        assert found.transition.id in {each.id for each in hub.query.findings("resolved", ENGINE)}
        agent.hand(point_of("a"))
        time.sleep(0.002)  # the next finding has an id of its own


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_of_two_findings_of_one_place_the_one_that_came_last_is_shown(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    agent.hand(fired("a"))
    time.sleep(0.002)
    agent.ahead_s, later = 0.0, fired("a")
    agent.hand(later)
    assert [each.id for each in hub.query.findings("firing", ENGINE)] == [later.transition.id]


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_a_window_until_now_has_every_finding_and_no_time_after_it(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    found = fired("a")
    agent.hand(found)
    now = timestamp(time.time_ns() + 1_000_000_000) or ""
    (shown,) = hub.query.findings("firing", ENGINE, until=now)
    assert (shown.since or "") <= now
    agent.hand(resolved(found, "a"))
    (over,) = hub.query.findings("resolved", ENGINE, until=now)
    assert (over.resolved_at or "") <= now


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_notes_are_in_the_order_of_the_stream(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    for number in range(3):
        agent.ahead_s = ahead_s * (number % 2)
        agent.hand(
            AnnotationMessage(
                id=str(number), agent="a", at_ns=time.time_ns(), engine=ENGINE, kind="gap", text=str(number)
            )
        )
    assert [note.text for note in hub.query.fleet_overview().notes] == ["2", "1", "0"]
    assert all((note.at or "") < "2100" for note in hub.query.fleet_overview().notes)


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_another_agent_is_believed_by_the_silence_of_the_first_and_not_by_its_clock(hub: Hub, ahead_s: float) -> None:
    WrongClock(hub, 0.0).hand(point_of("a", running=1))
    other = WrongClock(hub, ahead_s)
    other.hand(point_of("b", running=2))
    assert hub.link.owners.owner(ENGINE) == "a"
    hub.link.owners._described_s[ENGINE] -= OWNER_SILENT_S
    other.hand(point_of("b", running=3))
    assert hub.link.owners.owner(ENGINE) == "b"
    assert hub.query.engines()[0].running == 3


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_a_takeover_of_alerts_sends_what_was_not_sent_and_nothing_twice(hub: Hub, ahead_s: float) -> None:
    agent = WrongClock(hub, ahead_s)
    sent, unsent, over = fired("a"), fired("a", code="stuck.zero-token"), fired("a", code="corrupt.double-free")
    for message in (sent, over, resolved(over, "a"), unsent):
        agent.hand(message)
    name = Alerts(hub.alerts._config, lambda: False).receivers[0].name
    seen = tuple(hub.alerts._seen)
    hub.alerts._begin(HubRecord("before", "1", {name: SentUpTo(3)}), seen)
    assert hub.alerts.alerts is not None
    assert hub.alerts.alerts.outbox.pending_ids(name) == [seen[-1].id]
    assert {each.code for each in hub.alerts.alerts.view().open} == {"leak.finished-held", "stuck.zero-token"}
    agent.ahead_s = 0.0
    for message in (resolved(sent, "a"), resolved(unsent, "a")):
        agent.hand(message)
    hub.alerts._feed(hub.alerts.alerts)
    assert hub.alerts.alerts.view().open == []


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_an_agent_that_takes_over_ends_what_it_does_not_find_whatever_its_clock_shows(ahead_s: float) -> None:
    """Its engine's time and the time at which it took over are by two clocks."""
    second = 1_000_000_000
    engine_ns = time.time_ns() + round(ahead_s * 1e9)
    findings, found = Findings(), fired("before").transition.finding()
    findings.expect(ENGINE, [found])
    assert [each.id for each in findings.set_aside_since(0)] == [found.id]
    findings.update(ENGINE, engine_ns, [])
    assert [each.id for each in findings.firing()] == [found.id]
    (over,) = findings.update(ENGINE, engine_ns + 310 * second, [])
    assert (over.finding.id, over.to) == (found.id, "resolved")


@pytest.mark.parametrize("ahead_s", OFFSETS.values(), ids=OFFSETS)
def test_the_clock_is_reported_with_its_agent_and_no_longer_than_it_is_off(
    hub: Hub, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    WrongClock(hub, 0.3).hand(point_of("right", engine="other@127.0.0.1:1/0"))
    agent = WrongClock(hub, ahead_s)
    if ahead_s < 0:
        agent.hand(point_of("wrong"), ago_s=BEHIND_AFTER_S + 1)
        assert hub.query.findings("firing") == []
    agent.hand(point_of("wrong"))
    (found,) = [each for each in hub.query.findings("firing") if each.code == "blind.clock-jump"]
    assert found.engine == "agent wrong"
    assert ("ahead of" if ahead_s > 0 else "behind") in found.explanation
    assert found.verdict == ("confirmed" if ahead_s > 0 else "likely")
    assert hub.query.finding(found.id).finding.code == "blind.clock-jump"
    with hub.link.fold() as fold:
        assert fold.clocks.corrected == (ahead_s > 0)
    agent.ahead_s = 0.0
    agent.hand(point_of("wrong"))
    later = time.monotonic() + 120
    monkeypatch.setattr(time, "monotonic", lambda: later)
    monkeypatch.setattr(time, "monotonic_ns", lambda: round(later * 1e9))
    assert hub.query.findings("firing") == []


def test_messages_that_an_outage_held_back_are_no_clock_that_is_behind(hub: Hub) -> None:
    """Two outages, two minutes apart: each makes a few messages late, and one in between is in time."""
    agent = WrongClock(hub, 0.0)
    for began_s in (150, 30):
        for late_s in (25.0, 15.0, 6.0):
            agent.ahead_s = -late_s
            agent.hand(point_of("a"), ago_s=began_s - 25 + late_s / 25)
        agent.ahead_s = 0.0
        agent.hand(point_of("a"), ago_s=began_s - 27)
    agent.ahead_s = -7.0
    agent.hand(point_of("a"))
    assert hub.query.findings("firing") == []


def test_over_nats_an_engine_is_not_frozen_by_one_point_of_the_year_2262(tmp_path: Path) -> None:
    """With the messages that an agent sends: one far ahead, then right ones, for a hub that runs and for one that
    starts.
    """
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server], "a")
        set_up(config)
        found = fired("a")
        ahead = msgspec.structs.replace(point_of("a", found.transition.id, running=1), at_ns=2**63 - 1)
        wrong = msgspec.structs.replace(
            found, transition=msgspec.structs.replace(found.transition, at_ns=2**63 - 1, fired_ns=2**63 - 1)
        )
        with hub_of(bus_config_of([server], "hub-1", role="hub")) as hub:
            publish(config, [wrong, ahead])
            until(lambda: hub.query.findings("firing", ENGINE), "the finding")
            until(lambda: hub.query.findings("firing", "agent a"), "the clock")
            publish(config, [resolved(found, "a"), point_of("a", running=2)])
            until(lambda: hub.query.engines()[0].running == 2, "the right point")
            until(lambda: not hub.query.findings("firing", ENGINE), "its end")
        with hub_of(bus_config_of([server], "hub-2", role="hub")) as hub:
            assert hub.query.engines()[0].running == 2
            assert hub.query.findings("firing", ENGINE) == []
