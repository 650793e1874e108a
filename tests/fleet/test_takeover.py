"""Agents as processes over three nats-servers: when one dies another takes its engines over, and no finding moves."""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, decode
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_link import BusLink
from kvscope.monitor.fleet.bus_messages import finding_message
from kvscope.monitor.fleet.fleet_reader import FleetReader
from kvscope.monitor.fleet.lease_table import AGENT_LEASE_S
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.questions.pipeline import Pipeline
from tests.dashboards.programs import running
from tests.finding_transitions import AlertMessages
from tests.fleet.fleet_lab import Service, agent_of, assert_each_once, fold_of, owners, reading
from tests.fleet.nats_servers import NatsServer, bus_config_of, set_up, stored_findings, three_servers
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)

LEAK = "leak.finished-held:limit=3"
ENGINES = 4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NatsServer]]:
    with three_servers(tmp_path_factory.mktemp("nats") / "three") as started:
        yield started


def engine_name(number: int) -> str:
    return f"lab-{number}@127.0.0.1:0/0"


@contextmanager
def leaking_engines(folder: Path, count: int) -> Iterator[list[str]]:
    """Engines that leak blocks and work on, with journals."""
    with ExitStack() as stack:
        endpoints = []
        for number in range(count):
            events = f"ipc://{folder}/events-{number}"
            command = [
                sys.executable,
                "-m",
                "kvscope.lab.stepped_process",
                events,
                f"{events}-replay",
                str(folder / f"journal-{number}"),
            ]
            command += [str(number), LEAK]
            environment = {"KVSCOPE_ENGINE_ID": engine_name(number)}
            stack.enter_context(running(command, folder / f"engine-{number}.log", environment))
            endpoints.append(events)
        yield endpoints


def leases_of(agent: Service) -> int:
    """How many engines an agent processes; -1 while it finds out how late its loops are."""
    bus = agent.health().get("bus")
    return bus["leases"] if isinstance(bus, dict) else -1


def all_leak(reader: FleetReader) -> bool:
    with reader.fold() as fold:
        leaks = {f.judgement.engine for f in fold.open_findings() if f.judgement.code == "leak.finished-held"}
    return leaks == {engine_name(number) for number in range(ENGINES)}


@contextmanager
def two_agents(config: BusConfig, folder: Path) -> Iterator[tuple[FleetReader, Service, Service, set[str]]]:
    """Two agents of leaking engines: a reader, an agent that has engines, the other, and the engines of the first."""
    set_up(config, replicas=3)
    with leaking_engines(folder, ENGINES) as endpoints, ExitStack() as stack:
        agents = [agent_of(config, folder, f"agent-{number}", endpoints) for number in range(2)]
        for agent in agents:
            stack.callback(agent.end)
        reader = stack.enter_context(reading(config))
        until(lambda: all_leak(reader) and len(owners(reader)) == ENGINES, "every engine has its leak on the bus")
        before = owners(reader)
        first, other = agents if agents[0].name in before.values() else reversed(agents)
        yield reader, first, other, {engine for engine, owner in before.items() if owner == first.name}


@pytest.mark.slow
def test_a_dead_agents_engines_move_and_no_finding_fires_or_is_resolved(
    servers: list[NatsServer], tmp_path: Path
) -> None:
    config = bus_config_of(servers, tenant="takeover")
    with two_agents(config, tmp_path) as (reader, dead, heir, moving):
        until(lambda: not dead.health()["bus"]["spooled"], "all is sent")  # type: ignore[index]
        opened = {each.transition.id for each in stored_findings(config)}
        dead.kill()
        killed_s, killed_ns = time.monotonic(), time.time_ns()
        until(lambda: moving <= owners(reader, killed_ns).keys(), "another agent describes its engines")
        took_s = time.monotonic() - killed_s
        print(f"{len(moving)} engines moved in {took_s:.1f} s")
        assert took_s < AGENT_LEASE_S + 10
        time.sleep(15)  # a finding that was forgotten would have fired again, or been resolved
        later = stored_findings(config)
        kept = [each for each in later if each.transition.judgement.code == "leak.finished-held"]
        assert {each.transition.to for each in kept} == {"firing"}
        # The heir reports the same finding again as its verdict grows there. A hub knows it by its id.
        assert len({each.transition.id for each in kept}) == ENGINES
        assert {each.transition.id for each in kept} <= opened
        assert_each_once(later)
        assert all_leak(reader)
        assert [lacking_batches(heir, tmp_path, name, killed_ns) for name in sorted(moving)] == [[]] * len(moving)
        until(lambda: "taken-over" in {note.kind for note in fold_of(reader).annotations.values()}, "the move is noted")


def lacking_batches(heir: Service, folder: Path, name: str, killed_ns: int) -> list[int]:
    """Batches since an agent's death that the engine's journal has and its heir's history has not."""
    number = name.partition("@")[0].removeprefix("lab-")
    kept = {each.sequence for each in batches_of(directory_of(heir.data / "history", name))}
    batches = batches_of(folder / f"journal-{number}")
    wanted = {each.sequence for each in batches if each.wall_ns > killed_ns and each.sequence <= max(kept)}
    assert len(wanted) > 100
    return sorted(wanted - kept)


def batches_of(directory: Path) -> list[Batch]:
    frames = [decode(payload) for payload in journal.read(directory)]
    return [each for each in frames if isinstance(each, Batch) and each.sequence >= 0]


@pytest.mark.prove
def test_every_transition_is_stored_once_while_servers_die_and_hang(tmp_path: Path) -> None:
    """Transitions all the time; one node after another is killed, or stopped for a while."""
    with three_servers(tmp_path / "nats") as servers:
        config = bus_config_of(servers, tenant="faults")
        set_up(config, replicas=3)
        link = BusLink(config, Pipeline(), tmp_path / "bus.sqlite")
        link.start()
        try:
            sent = sent_during_faults(link, servers)
        finally:
            link.stop()
        assert sorted(each.id for each in stored_findings(config)) == sorted(sent)


def sent_during_faults(link: BusLink, servers: list[NatsServer]) -> list[str]:
    """The ids of what was handed to a link while servers died and hung."""
    received_alerts = AlertMessages()
    drawn = random.Random(7)
    sent: list[str] = []
    waits = []
    for fault in ("kill", "pause", "kill", "pause"):
        victim = drawn.choice(servers)
        began_s = time.monotonic()
        victim.kill() if fault == "kill" else victim.pause()
        while time.monotonic() - began_s < 8:
            second = 20 * (len(sent) + 1)
            reported = received_alerts.fire(second) + received_alerts.end(second + 5)
            link.put(reported)
            sent += [finding_message(each, "").id for each in reported]
            time.sleep(0.05)
        victim.start() if fault == "kill" else victim.resume()
        until(lambda: link.spool.messages == 0, "all is sent")
        waits.append(time.monotonic() - began_s - 8)
        until(lambda: all(server.is_well() for server in servers), "every server is well again")
    print(f"{len(sent)} transitions; after each fault all was sent {statistics.median(waits):.1f} s after its end")
    return sent


@pytest.mark.prove
def test_an_agent_that_was_stopped_gives_its_engines_up_when_it_wakes(
    servers: list[NatsServer], tmp_path: Path
) -> None:
    config = bus_config_of(servers, tenant="stopped")
    with two_agents(config, tmp_path) as (reader, stopped, heir, moving):
        stopped_ns = time.time_ns()
        os.kill(stopped.process.pid, signal.SIGSTOP)
        until(lambda: moving <= owners(reader, stopped_ns).keys(), "another agent describes its engines")
        os.kill(stopped.process.pid, signal.SIGCONT)
        until(lambda: leases_of(stopped) == 0, "it holds no lease any more")
        awake_ns = time.time_ns()
        until(lambda: len(owners(reader, awake_ns)) == ENGINES, "every engine is described again")
        assert set(owners(reader, awake_ns).values()) == {heir.name}
        stored = stored_findings(config)
        kept = [each.transition for each in stored if each.transition.judgement.code == "leak.finished-held"]
        assert {each.to for each in kept} == {"firing"}
        assert len({each.id for each in kept}) == ENGINES
        assert_each_once(stored)
