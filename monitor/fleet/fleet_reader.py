"""Follows the streams of a tenant into a fold, on a thread of its own or once for a command: what a hub stands on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from nats.js import JetStreamContext

from ..base.errors import CannotTell
from .bus_config import BusConfig
from .bus_connection import NATS_ERRORS, StreamMessage, connect_bus, follow, nats_error_text, read_all
from .bus_messages import BUS_MAJOR, BusMessage
from .bus_subjects import events_stream, hubs_bucket, leases_bucket, points_stream, stream_of_bucket
from .bus_thread import BusThread
from .fleet_fold import FleetFold, ToldFinding
from .fleet_owners import EngineOwner, owner_key
from .lease_table import AgentRecord, LeaseRecord, agent_key


class FleetReader(BusThread):
    """Follows everything of `config.tenant` until stopped. It never writes. Thread-safe."""

    def __init__(self, config: BusConfig) -> None:
        super().__init__(config, "the reader of the fleet")
        self._fold = FleetFold()
        self._lock = threading.Lock()
        self._caught_up = {"events": False, "points": False}

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
        """Return how long ago the last point of an engine arrived. No clock of an agent has a part in it."""
        return time.monotonic() - self._fold.arrived_s(engine)

    def received(self, taken: BusMessage, message: StreamMessage) -> None:
        """Note a message that was folded in. For subclasses."""

    def received_transition(self, told: ToldFinding) -> None:
        """Note a transition that counts from now on. For subclasses."""

    async def work(self, streams: JetStreamContext) -> None:
        """Follow the buckets, and both streams once these were read: who owns an engine decides what counts."""
        read = [asyncio.Event(), asyncio.Event()]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_bucket(streams, hubs_bucket(self.config.tenant), read[0]))
            await read[0].wait()
            tasks.create_task(self._follow_bucket(streams, leases_bucket(self.config.tenant), read[1]))
            await read[1].wait()
            tasks.create_task(self._follow(streams, "events", events_stream(self.config.tenant)))
            tasks.create_task(self._follow(streams, "points", points_stream(self.config.tenant)))

    async def _follow(self, streams: JetStreamContext, name: str, stream: str) -> None:
        async for messages in follow(streams, stream, ">", last_per_subject=True):
            with self._lock:
                for message in messages:
                    self._take(message)
            if not messages or messages[-1].pending == 0:
                self._caught_up[name] = True

    def _take(self, message: StreamMessage) -> None:
        taken = self._fold.take(message)
        if taken is not None:
            self.received(taken, message)
        self._release()

    def _release(self) -> None:
        for told in self._fold.take_released():
            self.received_transition(told)

    async def _follow_bucket(self, streams: JetStreamContext, bucket: str, read: asyncio.Event) -> None:
        stream, prefix = stream_of_bucket(bucket), f"$KV.{bucket}."
        async for messages in follow(streams, stream, f"{prefix}>", last_per_subject=True):
            with self._lock:
                for message in messages:
                    self.received_record(message.subject.removeprefix(prefix), message)
                self._release()
            if not messages or messages[-1].pending == 0:
                read.set()

    def received_record(self, key: str, message: StreamMessage) -> None:
        """Take a record of a bucket."""
        take_record(self._fold, key, message)


def take_record(fold: FleetFold, key: str, message: StreamMessage) -> None:
    """Take a record of a bucket that states who owns an engine, or who is alive. One that is unreadable, of a newer
    version or in another's name changes nothing.
    """
    kind = {"agent": AgentRecord, "engine": LeaseRecord, "owner": EngineOwner}.get(key.partition(".")[0])
    if kind is None or not message.body:
        return
    try:
        record = msgspec.json.decode(message.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if record.major > BUS_MAJOR:
        return
    match record:
        case EngineOwner() if key == owner_key(record.engine):
            fold.take_owner(record, time.monotonic())
        case AgentRecord() if key == agent_key(record.agent):
            fold.owners.see(record.agent, message.arrived_s())
        case LeaseRecord():
            fold.take_lease(key, record.agent, record.engines, time.monotonic())


def read_fleet(config: BusConfig) -> FleetFold:
    """Read what the streams of a tenant hold now. Raises CannotTell."""
    return asyncio.run(_read_fleet(config))


async def _read_fleet(config: BusConfig) -> FleetFold:
    fold = FleetFold()
    client = await connect_bus(config, wait=False)
    try:
        streams = client.jetstream()
        for bucket in (hubs_bucket(config.tenant), leases_bucket(config.tenant)):
            async for message in read_all(streams, stream_of_bucket(bucket), ">"):
                take_record(fold, message.subject.removeprefix(f"$KV.{bucket}."), message)
        for stream in (points_stream(config.tenant), events_stream(config.tenant)):
            async for message in read_all(streams, stream, ">"):
                fold.take(message)
    except NATS_ERRORS as error:
        raise CannotTell(
            f"the streams of tenant {config.tenant} cannot be read ({nats_error_text(error)}). `monitor bus setup`"
            " makes them, and the credentials must allow what `monitor bus permissions --read-only` prints"
        ) from error
    finally:
        await client.close()
    return fold
