"""Follows the streams of a tenant into a fold, on a thread of its own or once for a command: what a hub stands on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nats.js import JetStreamContext

from kvscope.monitor.bus.bus_config import BusConfig
from kvscope.monitor.bus.bus_connection import (
    NATS_ERRORS,
    StreamMessage,
    connect_bus,
    follow,
    nats_error_text,
    read_all,
)
from kvscope.monitor.bus.bus_messages import BusMessage, PointMessage
from kvscope.monitor.bus.bus_subjects import events_stream, points_stream
from kvscope.monitor.bus.bus_thread import BusThread
from kvscope.monitor.bus.fleet_fold import FleetFold
from kvscope.monitor.errors import CannotTell


class FleetReader(BusThread):
    """Follows everything of `config.tenant` until stopped. It never writes. Thread-safe."""

    def __init__(self, config: BusConfig) -> None:
        super().__init__(config, "kvscope-fleet")
        self._fold = FleetFold()
        self._lock = threading.Lock()
        self._caught_up = {"events": False, "points": False}
        self._stored_s: dict[str, float] = {}

    @property
    def is_complete(self) -> bool:
        """Whether all that was stored has been read once."""
        return all(self._caught_up.values())

    @contextmanager
    def fold(self) -> Iterator[FleetFold]:
        """Lend the fold: nothing is folded in meanwhile."""
        with self._lock:
            yield self._fold

    def age_s(self, engine: str) -> float:
        """Return how long ago the last point of an engine was stored, by this machine's clock and the server's."""
        return max(0.0, time.time() - self._stored_s.get(engine, 0.0))

    def received(self, taken: BusMessage, message: StreamMessage) -> None:
        """Note a message that was folded in. For subclasses."""

    async def work(self, streams: JetStreamContext) -> None:
        """Follow both streams."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(streams, "events", events_stream(self.config.tenant)))
            tasks.create_task(self._follow(streams, "points", points_stream(self.config.tenant)))

    async def _follow(self, streams: JetStreamContext, name: str, stream: str) -> None:
        async for messages in follow(streams, stream, ">", last_per_subject=True):
            with self._lock:
                for message in messages:
                    self._take(_kind_of(message.subject), message)
            if not messages or messages[-1].pending == 0:
                self._caught_up[name] = True

    def _take(self, kind: str, message: StreamMessage) -> None:
        taken = self._fold.take(kind, message.body)
        if isinstance(taken, PointMessage):
            self._stored_s[taken.engine.engine] = message.stored_s
        if taken is not None:
            self.received(taken, message)


def read_fleet(config: BusConfig) -> FleetFold:
    """Read what the streams of a tenant hold now. Raises CannotTell."""
    return asyncio.run(_read_fleet(config))


async def _read_fleet(config: BusConfig) -> FleetFold:
    fold = FleetFold()
    client = await connect_bus(config, wait=False)
    try:
        streams = client.jetstream()
        for stream in (points_stream(config.tenant), events_stream(config.tenant)):
            async for message in read_all(streams, stream, ">"):
                fold.take(_kind_of(message.subject), message.body)
    except NATS_ERRORS as error:
        raise CannotTell(
            f"the streams of tenant {config.tenant} cannot be read ({nats_error_text(error)}). `monitor bus setup`"
            " makes them, and the credentials must allow what `monitor bus permissions` prints"
        ) from error
    finally:
        await client.close()
    return fold


def _kind_of(subject: str) -> str:
    """Return the kind of a message by its subject, kvscope.v1.TENANT.KIND and so on."""
    return subject.split(".")[3]
