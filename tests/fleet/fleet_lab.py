"""A whole fleet on this machine: three NATS nodes, agents that share engines, hubs, and incidents on request."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from kvscope.lab.chaos.engines_process import chaos_engine_name
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import StreamMessage
from kvscope.monitor.fleet.bus_messages import BusMessage, FindingMessage
from kvscope.monitor.fleet.fleet_fold import FleetFold
from kvscope.monitor.fleet.fleet_reader import FleetReader
from tests.dashboards.programs import TOKEN, free_port, running
from tests.fleet.cut_links import Machine, Machines
from tests.fleet.identities import Authority
from tests.fleet.nats_servers import NatsServer, bus_config_of, need_nats, set_up, three_servers
from tests.fleet.stoppable import StoppableProgram
from tests.waiting import until

MONITOR = str(Path(sys.executable).parent / "monitor")
LEAK_CODE = "leak.finished-held"
GRACE_S = 3
"""Engines of a busy machine stand still for a second now and then, with blocks held for a transfer."""
PORTS = 4222, 8222, 6222


class Service(StoppableProgram):
    """A `monitor agent`, `serve` or `hub` with these arguments, maybe in a namespace."""

    def __init__(self, kind: str, folder: Path, name: str, arguments: Sequence[str], machine: Machine | None) -> None:
        self.name = name
        self.machine = machine
        self.port = free_port()
        self.data = folder / name
        host = machine.address if machine is not None else "127.0.0.1"
        self.url = f"http://{host}:{self.port}"
        prefix = machine.prefix if machine is not None else ()
        outside = ["--host", host, "--token", TOKEN] if machine is not None else []
        command = [*prefix, MONITOR, kind, "--port", str(self.port), *outside, *arguments]
        super().__init__(command, folder / f"{name}.log")

    def health(self) -> dict[str, object]:
        return dict(self.ask("/healthz"))

    def ask(self, path: str, **parameters: str) -> Any:
        """The JSON of a route. Raises httpx2.HTTPError."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx2.get(f"{self.url}{path}", params=parameters, headers=headers, trust_env=False, timeout=10)
        return answer.raise_for_status().json()


def agent_of(
    config: BusConfig,
    folder: Path,
    name: str,
    engines: Sequence[str],
    machine: Machine | None = None,
    settings: Sequence[str] = (),
) -> Service:
    """An agent that shares engines with others of the same tenant."""
    arguments = ["--data", str(folder / name), "--nats-share", "--nats-agent", name, *bus_flags(config)]
    arguments += [part for engine in engines for part in ("--events", engine)]
    arguments += [part for setting in settings for part in ("--set", setting)]
    return Service("agent", folder, name, arguments, machine)


def bus_flags(config: BusConfig) -> list[str]:
    """The flags of a configuration."""
    flags = ["--nats-tenant", config.tenant]
    flags += [part for url in config.urls for part in ("--nats", url)]
    for flag, path in (("ca", config.tls_ca), ("cert", config.tls_cert), ("key", config.tls_key)):
        flags += [f"--nats-{flag}", str(path)] if path is not None else []
    return flags


class CountingReader(FleetReader):
    """Reads as a hub does, and counts how often it took each transition."""

    def __init__(self, config: BusConfig) -> None:
        super().__init__(config)
        self.transitions: Counter[str] = Counter()

    def received(self, taken: BusMessage, message: StreamMessage) -> None:
        if isinstance(taken, FindingMessage):
            self.transitions[taken.id] += 1


class FleetLab:
    """What runs, and what the bus says of it. Agents are `agent-N`, engines those of the chaos run."""

    def __init__(self, folder: Path, servers: list[NatsServer], config: BusConfig, reader: CountingReader) -> None:
        self.folder = folder
        self.servers = servers
        self.config = config
        self.reader = reader
        self.agents: list[Service] = []
        self.hubs: list[Service] = []

    def set_leak(self, number: int, is_on: bool) -> None:
        """Begin or end a leak of an engine."""
        marker = self.folder / "engines" / f"leak-{number}"
        marker.touch() if is_on else marker.unlink()

    def set_leaks(self) -> list[int]:
        """The engines that leak now."""
        return [int(marker.name.removeprefix("leak-")) for marker in (self.folder / "engines").glob("leak-*")]

    def leaking(self) -> set[str]:
        """The engines whose leak is open on the bus."""
        with self.reader.fold() as fold:
            found = [finding.judgement for finding in fold.open_findings()]
        return {judged.engine for judged in found if judged.code == LEAK_CODE}

    def owners(self, after_ns: int = 0) -> dict[str, str]:
        """The agent of each engine's last point, of points after a time."""
        return owners(self.reader, after_ns)


def fold_of(reader: FleetReader) -> FleetFold:
    with reader.fold() as fold:
        return fold


def owners(reader: FleetReader, after_ns: int = 0) -> dict[str, str]:
    """Which agent described each engine last, of points after a time."""
    with reader.fold() as fold:
        return {name: point.agent for name, point in fold.points.items() if point.at_ns > after_ns}


@contextmanager
def reading(config: BusConfig) -> Iterator[CountingReader]:
    """A reader of everything on the bus."""
    reader = CountingReader(config)
    reader.start()
    try:
        yield reader
    finally:
        reader.stop()


@contextmanager
def running_fleet(
    folder: Path, engines: int, agents: int, hubs: int = 0, machines: Machines | None = None
) -> Iterator[FleetLab]:
    """Start it, and wait until every engine is on the bus. With machines, nodes, agents and hubs have one each."""
    with ExitStack() as stack:
        if machines is None:
            servers = stack.enter_context(three_servers(folder / "nats"))
            config = bus_config_of(servers)
        else:
            servers, config = stack.enter_context(_servers_on(machines.machines[:3], folder))
        set_up(config, replicas=3)
        (folder / "engines").mkdir()
        command = [
            sys.executable,
            "-m",
            "kvscope.lab.chaos.engines_process",
            str(folder / "engines"),
            "0",
            str(engines),
            "0",
        ]
        stack.enter_context(running(command, folder / "engines.log"))
        lab = FleetLab(folder, servers, config, stack.enter_context(reading(config)))
        endpoints = [f"ipc://{folder}/engines/events-{number}" for number in range(engines)]
        for number in range(agents):
            machine = machines.machines[3 + number] if machines is not None else None
            # An agent that took an engine over has seen few transfers end, and would wait for minutes to judge a leak.
            # One that saw a leak end would take that long for a transfer.
            settings = [f"{LEAK_CODE}.{each}" for each in (f"grace_s={GRACE_S}", "unseen_times=0", "times_longest=0")]
            lab.agents.append(agent_of(config, folder, f"agent-{number}", endpoints, machine, settings))
            stack.callback(lab.agents[-1].end)
        for number in range(hubs):
            machine = machines.machines[3 + agents + number] if machines is not None else None
            flags = ["--nats-agent", f"hub-{number}", *bus_flags(config)]
            lab.hubs.append(Service("hub", folder, f"hub-{number}", flags, machine))
            stack.callback(lab.hubs[-1].end)
        names = {chaos_engine_name(number) for number in range(engines)}
        until(lambda: lab.owners().keys() == names, "every engine is on the bus")
        yield lab


@contextmanager
def _servers_on(machines: list[Machine], folder: Path) -> Iterator[tuple[list[NatsServer], BusConfig]]:
    """Three nodes of a cluster over TLS, and a configuration with a client certificate."""
    need_nats()
    port, monitor, route = PORTS
    authority = Authority(folder)
    routes = ", ".join(f'"nats://{machine.address}:{route}"' for machine in machines)
    servers: list[NatsServer] = []
    try:
        for number, machine in enumerate(machines):
            certificate, key = authority.issue(f"server-{number}", machine.address)
            files = f'cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.path}", verify: true'
            settings = (
                f"tls {{ {files} }}\n"
                f"cluster {{ name: test, listen: {machine.address}:{route}, routes: [{routes}], tls {{ {files} }} }}\n"
            )
            node = NatsServer(folder / f"node{number}", port, monitor, settings, machine.address, machine.prefix)
            servers.append(node)
        until(lambda: all(server.is_well() for server in servers), "every server is well")
        certificate, key = authority.issue("agent")
        urls = tuple(f"tls://{machine.address}:{port}" for machine in machines)
        yield servers, BusConfig(urls, agent="test", tls_ca=authority.path, tls_cert=certificate, tls_key=key)
    finally:
        for server in servers:
            server.end()


def assert_each_once(stored: list[FindingMessage]) -> None:
    """No message twice, and of each finding no end that follows no beginning. One whose verdict changed fires again."""
    assert len({each.id for each in stored}) == len(stored)
    last: dict[str, str] = {}
    for each in sorted(stored, key=lambda message: message.transition.at_ns):
        assert each.transition.to == "firing" or last.get(each.transition.id) == "firing", each
        last[each.transition.id] = each.transition.to


def wait_moved(lab: FleetLab, engines: set[str], fault_ns: int, away: str) -> float:
    """Wait until agents other than `away` have described these engines; how long it took since the fault."""

    def moved() -> bool:
        now = lab.owners(fault_ns)
        return all(now.get(engine, away) != away for engine in engines)

    until(moved, f"other agents describe what {away} had")
    return (time.time_ns() - fault_ns) / 1e9
