"""Alerts of several hubs: each message leaves once, from the hub with the lease, and the next goes on behind it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import cast

import httpx2
import pytest
from nats.js import JetStreamContext

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.detectors.findings import Transition
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_messages import finding_message
from kvscope.monitor.fleet.fleet_fold import ToldFinding
from kvscope.monitor.fleet.fleet_link import FleetLink
from kvscope.monitor.fleet.hub_lease import HubLease, HubRecord, SentUpTo
from kvscope.monitor.fleet.lease_table import AGENT_LEASE_S, HOLD_S, RENEW_LEASE_S
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.service.hub_alerts import HubAlerts
from kvscope.monitor.service.hub_findings import HubFindings
from tests.finding_transitions import AlertMessages
from tests.fleet import stored
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up
from tests.test_service import process, receiver
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
CODES = ("leak.finished-held", "stuck.zero-token", "corrupt.double-free")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with one_server(tmp_path_factory.mktemp("nats")) as started:
        yield started


def publish(config: BusConfig, transitions: Sequence[Transition]) -> list[str]:
    """Publish as an agent does; the ids of the messages."""
    messages = [finding_message(each, "agent") for each in transitions]
    stored.publish(config, messages)
    return [each.id for each in messages]


def ids_of(received: list[tuple[str, dict[str, str], bytes]]) -> Counter[str]:
    return Counter(headers["webhook-id"] for _, headers, _ in received)


def test_a_hub_that_ends_hands_over_what_was_sent_and_the_silences(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="handover")
    set_up(config)
    received_alerts = AlertMessages()
    with receiver() as (url, received):
        alerts = AlertsConfig((f"{url}/alerts",), allow_private=True)
        first = publish(config, received_alerts.fire(1_000, CODES[0]))
        with hub_of(bus_config_of([server], "hub-1", tenant="handover"), alerts=alerts) as one:
            until(lambda: len(received) == 1, "the alert that fires as the first hub begins")
            one.alerts.sending().silence(["code=leak.unaccounted"], 600, "planned")
            with hub_of(bus_config_of([server], "hub-2", tenant="handover"), alerts=alerts) as two:
                second = publish(config, received_alerts.fire(1_001, CODES[1]))
                until(lambda: len(received) == 2, "the second alert")
                with pytest.raises(NotKnown, match="hub hub-1 sends the alerts"):
                    two.query.alert_state()
                one.stop()
                until(two.alerts.holds, "the other hub sends")
                until(lambda: two.alerts.alerts is not None, "its alerts")
                third = publish(config, received_alerts.end(1_005))
                quiet = publish(config, received_alerts.fire(1_100, "leak.unaccounted"))
                until(lambda: set(third) <= set(ids_of(received)), "that both are over")
                until(lambda: two.query.alert_state().open, "the alert that is silenced")
                shown = two.query.alert_state()
                assert [each.matchers for each in shown.silences] == [["code=leak.unaccounted"]]
                assert [each.code for each in shown.open] == ["leak.unaccounted"]
        assert ids_of(received) == dict.fromkeys([*first, *second, *third], 1)
        assert quiet[0] not in ids_of(received)


def test_a_receiver_that_is_new_gets_what_fires_and_nothing_that_is_over(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="new-receiver")
    set_up(config)
    received_alerts = AlertMessages()
    publish(config, [*received_alerts.fire(1_000, CODES[0]), *received_alerts.end(1_005)])
    (still,) = publish(config, received_alerts.fire(1_010, CODES[1]))
    hub = bus_config_of([server], "hub-1", tenant="new-receiver")
    with receiver() as (url, received), receiver() as (other_url, other):
        with hub_of(hub, alerts=AlertsConfig((f"{url}/alerts",), allow_private=True)) as one:
            until(lambda: ids_of(received) == {still: 1}, "the alert that fires")
            until(lambda: one.alerts._lease.record.sent, "the lease says so")
        both = AlertsConfig((f"{url}/alerts", f"{other_url}/alerts"), allow_private=True)
        with hub_of(hub, alerts=both):
            until(lambda: ids_of(other) == {still: 1}, "the alert that fires")
        assert ids_of(received) == {still: 1}


def test_a_hub_that_reads_behind_the_last_holder_sends_nothing_again() -> None:
    link = FleetLink(BusConfig(("nats://127.0.0.1:1",), agent="hub-1"))
    link._caught_up = dict.fromkeys(link._caught_up, True)
    alerts = AlertsConfig(("http://127.0.0.1:1/alerts",), allow_private=True)
    hub = HubAlerts(alerts, link, HubFindings(link))
    receiver_name = Alerts(hub._config, lambda: False).receivers[0].name
    transitions = AlertMessages()
    messages = [
        finding_message(*transitions.fire(1_000, CODES[0], engine=f"tiny@{number}"), agent="agent")
        for number in range(5)
    ]

    def take(first: int, after: int) -> None:
        for number in range(first, after):
            hub.take(ToldFinding(messages[number], number + 1, 0.0, 0.0))

    take(0, 1)
    hub._lease.written(hub._lease.to_write({receiver_name: SentUpTo(2, [4])}, []), 1, time.monotonic())
    asyncio.run(hub._turn(cast("JetStreamContext", None)))
    assert hub.alerts is not None
    assert hub._sent(hub.alerts, receiver_name) == SentUpTo(2)
    take(1, 5)
    hub._feed(hub.alerts)
    assert set(hub.alerts.outbox.pending_ids(receiver_name)) == {messages[2].id, messages[4].id}
    assert hub._sent(hub.alerts, receiver_name) == SentUpTo(2, [4])
    hub.close()


@pytest.mark.slow
def test_each_alert_leaves_once_though_hubs_are_killed_and_stopped(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="takeover")
    set_up(config)
    received_alerts = AlertMessages()
    expected = publish(config, received_alerts.fire(1_000, CODES[0]))
    with receiver() as (url, received), ExitStack() as stack:

        def hub(name: str) -> tuple[object, httpx2.Client]:
            arguments = ("--nats", server.url, "--nats-tenant", "takeover", "--nats-agent", name, "--port", "0")
            run = stack.enter_context(
                process("kvscope.monitor", "hub", *arguments, "--alert", f"{url}/alerts", "--alert-private")
            )
            assert run.stderr is not None
            address = run.stderr.readline().split()[2].rstrip(",")
            client = stack.enter_context(httpx2.Client(base_url=address, trust_env=False))
            until(lambda: client.get("/healthz").json()["complete"], "a hub that has read all")
            return run, client

        killed, _ = hub("hub-1")
        until(lambda: len(received) == len(expected), "the first alert")
        stopped, _ = hub("hub-2")
        killed.kill()  # type: ignore[attr-defined]
        expected += publish(config, received_alerts.fire(1_001, CODES[1]))
        until(lambda: len(received) == len(expected), "the alert of the second hub")
        _, third = hub("hub-3")
        stopped.send_signal(signal.SIGSTOP)  # type: ignore[attr-defined]
        expected += publish(config, received_alerts.fire(1_002, CODES[2]))
        until(lambda: len(received) == len(expected), "the alert of the third hub")
        stopped.send_signal(signal.SIGCONT)  # type: ignore[attr-defined]
        expected += publish(config, received_alerts.end(1_006))
        until(lambda: len(received) == len(expected), "that they are over")
        assert len(third.get("/api/alerts").json()["receivers"]) == 1
        assert ids_of(received) == dict.fromkeys(expected, 1)
        kinds = Counter(json.loads(body)["type"] for _, _, body in received)
        assert kinds == {"kvscope.finding.firing": 3, "kvscope.finding.resolved": 3}


def test_the_lease_is_taken_when_it_is_over_and_relied_on_for_less() -> None:
    one, two = HubLease("one", "1"), HubLease("two", "2")
    assert one.should_write(0.0, changed=False)
    record = one.to_write({"webhook": SentUpTo(7)}, [])
    one.written(record, 1, 0.0)
    two.receive(record, 1, 0.1)
    assert one.holds(HOLD_S - 0.1)
    assert not one.holds(HOLD_S)
    assert not one.should_write(RENEW_LEASE_S - 0.1, changed=False)
    assert one.should_write(RENEW_LEASE_S - 0.1, changed=True)
    assert not two.should_write(AGENT_LEASE_S, changed=True)
    assert two.should_write(AGENT_LEASE_S + 0.1, changed=False)
    taken = two.to_write(two.record.sent, [])
    two.written(taken, 2, 16.0)
    one.receive(taken, 2, 16.1)
    assert two.holds(16.2)
    assert not one.holds(0.0)
    assert two.record.sent == {"webhook": SentUpTo(7)}
    one.receive(record, 1, 17.0)  # late, and older
    assert one.record == taken
    left = two.to_write({}, [], leaving=True)
    assert left == HubRecord("", "")
