"""The cost of a fleet: processor time of agents that share engines over NATS, and bytes on the bus, as it grows.

    python -m benchmarks.fleet [--seconds N] [--engines E …] [--agents A …]

Engines without models publish real streams from one process, agents process them under leases, and one nats-server
counts the bytes that reach it. Processor time is fitted as a part for each agent, engine, batch and block event. To
tell these apart, the first number of agents is measured at two rates, and one and ten engines also with large batches.
Bytes are fitted without transitions of findings, whose number depends on the load: a part for each agent, for each
engine, and for each pair of them, because an agent's heartbeat lists the engines that it could read. The residuals show
how far from linear both are. Processor time is that of the agents' processes, so that other work on the machine adds as
little as can be.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2
import numpy as np
from nats.js import JetStreamContext

from benchmarks.machine import machine
from kvscope.lab.chaos.service_process import ServiceProcess, process_cost
from kvscope.lab.chaos.soak import FleetProcess
from kvscope.monitor.fleet.bus_subjects import events_stream
from kvscope.monitor.fleet.fleet_reader import FleetReader
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up, with_client

STEPS_PER_S: Final = (1.0, 4.0)
BUSY: Final = ((1, 20.0, 8), (10, 4.0, 8), (1, 20.0, 32))
"""Engines, steps a second, and the scale of their requests and pools."""
WARM_UP_S: Final = 6.0
SETTLE_S: Final = 240.0
FLEET_ENGINES, FLEET_EVENTS_PER_S = 1_000, 10_000
FLEET_STEPS_PER_S, FLEET_AGENTS_EACH = 30, 2


class FleetRow(NamedTuple):
    """One measurement of `seconds`. raw_bytes: of the engines' batches. bus_bytes: the bytes that agents sent to NATS,
    of which finding_bytes are transitions.
    """

    agents: int
    engines: int
    seconds: float
    batches: int
    block_events: int
    raw_bytes: int
    cpu_s: float
    bus_bytes: int
    finding_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 10, 50, 100], metavar="E")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 2, 4], metavar="A")
    parsed = parser.parse_args()
    print(machine("msgspec", "pyzmq", "nats-py"), flush=True)
    print(
        f"\n{'agents':>7}{'engines':>9}{'batches/s':>11}{'block events/s':>16}{'of a core':>11}{'CPU s a million':>17}"
        f"{'bus KB/s':>10}{'transitions':>13}{'MB an engine-hour':>19}{'of raw':>8}",
        flush=True,
    )
    rows = [
        measured(agents, engines, rate, parsed.seconds)
        for agents in parsed.agents
        for engines in parsed.engines
        for rate in (STEPS_PER_S if agents == parsed.agents[0] else STEPS_PER_S[-1:])
    ]
    rows += [measured(parsed.agents[0], engines, rate, parsed.seconds, scale) for engines, rate, scale in BUSY]
    print("\n".join(report(rows)))


def measured(agents: int, engines: int, steps_per_s: float, seconds: float, scale: int = 1) -> FleetRow:
    """Let so many agents share so many engines, measure for so long, and print a line."""
    with running_agents(agents, engines, steps_per_s, scale) as (fleet, services, server):
        time.sleep(WARM_UP_S)
        found = finding_bytes(server)
        first, cpu_s, began = fleet.next_report(), total_cpu_s(services), bytes_in(server)
        time.sleep(seconds)
        last, ended = fleet.next_report(), bytes_in(server)
        seconds = last.at_s - first.at_s
        row = FleetRow(
            agents,
            engines,
            seconds,
            last.batches - first.batches,
            last.block_events - first.block_events,
            last.bytes - first.bytes,
            total_cpu_s(services) - cpu_s,
            ended - began,
            finding_bytes(server) - found,
        )
    print(
        f"{agents:>7}{engines:>9}{row.batches / seconds:>11,.0f}{row.block_events / seconds:>16,.0f}"
        f"{row.cpu_s / seconds:>11.1%}"
        f"{1e6 * row.cpu_s / row.block_events:>17.1f}{row.bus_bytes / seconds / 1e3:>10.2f}"
        f"{row.finding_bytes / row.bus_bytes:>13.0%}"
        f"{3600e-6 * row.bus_bytes / seconds / engines:>19.2f}{row.bus_bytes / row.raw_bytes:>8.1%}",
        flush=True,
    )
    return row


@contextmanager
def running_agents(
    agents: int, engines: int, steps_per_s: float, scale: int = 1
) -> Iterator[tuple[FleetProcess, list[ServiceProcess], NatsServer]]:
    """Start NATS, the engines and the agents, and wait until the agents have all engines."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscope-fleet-")))
        server = stack.enter_context(one_server(folder / "nats"))
        config = bus_config_of([server])
        set_up(config)
        fleet = FleetProcess(folder, engines, steps_per_s, scale)
        stack.callback(fleet.close)
        shared = ["--port", "0", "--nats", server.url, "--nats-share"]
        shared += [part for number in range(engines) for part in ("--events", f"ipc://{folder}/events-{number}")]
        services = []
        for number in range(agents):
            own = ["--data", str(folder / f"data-{number}"), "--nats-agent", f"agent-{number}"]
            services.append(ServiceProcess(*shared, *own, service="agent"))
            stack.callback(services[-1].close)
        reader = FleetReader(config)
        reader.start()
        try:
            wait_for_all(reader, engines)
        finally:
            reader.stop()
        yield fleet, services, server


def wait_for_all(reader: FleetReader, engines: int) -> None:
    """Wait until every engine has a point. Raises RuntimeError."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        with reader.fold() as fold:
            found = len(fold.points)
        if found == engines:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"the agents have {found} of {engines} engines")
        time.sleep(0.5)


def total_cpu_s(services: list[ServiceProcess]) -> float:
    return sum(process_cost(service.process.pid).cpu_s for service in services)


def bytes_in(server: NatsServer) -> int:
    """Return the bytes of messages that clients have sent to a server so far, headers included."""
    reported: dict[str, Any] = httpx2.get(f"{server.monitor}/varz", trust_env=False).json()
    return int(reported["in_bytes"])


def finding_bytes(server: NatsServer) -> int:
    """Return the bytes of all transitions and annotations that the stream has taken so far."""
    config = bus_config_of([server])

    async def read(streams: JetStreamContext) -> int:
        return (await streams.stream_info(events_stream(config.tenant))).state.bytes

    return with_client(config, read)


def report(rows: list[FleetRow]) -> Iterator[str]:
    """Yield both fits with their residuals, and the sizes that follow from them."""
    cpu = fitted([_load_of(row) for row in rows], rates(rows, "cpu_s"))
    steady = [(row.bus_bytes - row.finding_bytes) / row.seconds for row in rows]
    bus = fitted([[row.agents, row.engines, row.agents * row.engines] for row in rows], steady)
    agent_ms, engine_ms, batch_ms, event_ms = (1e3 * part for part in cpu.parts)
    yield "\nfitted, relative errors weighted alike:"
    yield (
        f"  processor  {agent_ms:.1f} ms a second for each agent, {engine_ms:.2f} for each engine,"
        f" {batch_ms:.2f} for each batch, {1e3 * event_ms:.2f} µs for each block event"
    )
    yield (
        f"  bus        {bus.parts[0]:,.0f} bytes a second for each agent, {bus.parts[1]:,.0f} for each engine,"
        f" {bus.parts[2]:,.0f} for each engine and agent that could read it; transitions of findings besides"
    )
    for name, fit in (("processor", cpu), ("bus", bus)):
        listed = ", ".join(
            f"{row.agents}×{row.engines} {residual:+.0%}" for row, residual in zip(rows, fit.residuals, strict=True)
        )
        yield f"  residuals of the {name} (agents×engines): {listed}"
    core_s = engine_ms / 1e3 + FLEET_STEPS_PER_S * batch_ms / 1e3 + FLEET_EVENTS_PER_S * event_ms / 1e3
    bytes_s = bus.parts[1] + FLEET_AGENTS_EACH * bus.parts[2]
    raw_bytes_s = FLEET_EVENTS_PER_S * rows[-1].raw_bytes / rows[-1].block_events
    yield (
        f"\ncalculated, not measured: {FLEET_ENGINES:,} engines of {FLEET_EVENTS_PER_S:,} block events/s in"
        f" {FLEET_STEPS_PER_S} batches, each named to {FLEET_AGENTS_EACH} agents:\n"
        f"  {FLEET_ENGINES * core_s:,.0f} cores near the engines, {FLEET_ENGINES * bytes_s / 1e6:.1f} MB/s to NATS,"
        f" {bytes_s / raw_bytes_s:.2%} of the raw stream\n"
        "  with as many bytes a block event as in the last row"
    )


def _load_of(row: FleetRow) -> list[float]:
    return [row.agents, row.engines, row.batches / row.seconds, row.block_events / row.seconds]


def rates(rows: list[FleetRow], name: str) -> list[float]:
    return [getattr(row, name) / row.seconds for row in rows]


class Fit(NamedTuple):
    """The parts of a cost, and how far each measurement is above (+) or below what they give, as a share of it."""

    parts: list[float]
    residuals: list[float]


def fitted(shape: list[list[float]], taken: list[float]) -> Fit:
    """Fit `taken` as a sum of the columns of `shape`, each with a part that is not negative."""
    columns, values = np.array(shape, dtype=float), np.array(taken)
    chosen = list(range(columns.shape[1]))
    while True:  # a part that would be negative is none
        weighted = columns[:, chosen] / values[:, None]
        parts = np.linalg.lstsq(weighted, np.ones(len(values)), rcond=None)[0]
        if (parts >= 0).all():
            break
        del chosen[int(parts.argmin())]
    whole = np.zeros(columns.shape[1])
    whole[chosen] = parts
    return Fit(whole.tolist(), (values / (columns @ whole) - 1).tolist())


if __name__ == "__main__":
    main()
