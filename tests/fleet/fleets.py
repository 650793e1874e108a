"""A hub with agents, over a real nats-server: all in one process but for the server and the engines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.service.hub_server import Hub, HubConfig
from tests.waiting import until


@contextmanager
def hub_of(bus: BusConfig, **fields: object) -> Iterator[Hub]:
    """A hub that has read what is stored."""
    hub = Hub(HubConfig(bus=bus, **fields))  # type: ignore[arg-type]
    hub.start()
    try:
        until(lambda: hub.link.is_complete, "the hub has read what is stored")
        yield hub
    finally:
        hub.stop()
