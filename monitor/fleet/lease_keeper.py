"""Holds the leases of shared engines: heartbeats, renewals, takeovers and handing over (lease_table.py decides)."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import msgspec
from nats.js import JetStreamContext

from .bus_config import BusConfig
from .bus_connection import REQUEST_TIMEOUT_S, compare_and_put, follow
from .bus_messages import BUS_MAJOR, AnnotationKind
from .bus_spool import BusSpool
from .bus_subjects import leases_bucket, stream_of_bucket
from .lease_table import RENEW_LEASE_S, AgentRecord, LeaseRecord, LeaseStep, LeaseTable, agent_key, lease_key
from .open_findings import LeftBehind, left_behind

logger = logging.getLogger(__name__)

LEASE_TURN_S: Final = 0.5
SEND_WITHIN_S: Final = 3.0
LOCAL_HOSTS: Final = ("localhost", "127.", "[::1]")
"""An address of these, or of ipc://, is another engine on another machine."""


class ShareEngines(Protocol):
    """How engines of leases begin and end in this service. Called by one thread of the bus."""

    def targets(self) -> Sequence[str]:
        """Return the targets that this agent can read."""
        ...

    def begin(self, target: str, expected: dict[str, LeftBehind]) -> None:
        """Read a target from now on. `expected`: where another agent left each of its engines."""
        ...

    def end(self, target: str) -> None:
        """Stop reading a target: another agent does. No finding fires or is resolved by it."""
        ...

    def engines(self, target: str) -> Sequence[str]:
        """Return the engines that were found at a target."""
        ...


Annotate = Callable[[str, AnnotationKind, str], None]


class LeaseKeeper:
    """The leases of this run of an agent. `spool` holds findings back while a lease is in doubt."""

    def __init__(
        self, config: BusConfig, instance: str, spool: BusSpool, share: ShareEngines, annotate: Annotate
    ) -> None:
        self.taken_over = 0
        """Engines that another agent held before."""
        self._config = config
        self._spool = spool
        self._share = share
        self._annotate = annotate
        self._bucket = leases_bucket(config.tenant)
        self._table = LeaseTable(config.agent, instance, {})
        self._heartbeat_s = -RENEW_LEASE_S
        self._is_read = False
        self._targets_of: dict[str, str] = {}
        self._read_behind: set[str] = set()

    def held(self) -> list[str]:
        """Return the targets whose lease this agent has."""
        return self._table.held()

    @property
    def namesake(self) -> bool:
        """Whether another process runs under this agent's name."""
        return self._table.namesake

    def has_read(self, engine: str) -> bool:
        """Return whether it was read with the lease where the agent before this one left an engine."""
        return engine in self._read_behind

    def relies_on(self, engine: str) -> bool:
        """Return whether no other agent can process an engine now. Any thread may ask."""
        target = self._targets_of.get(engine)
        if target is None:
            target = next((each for each in self.held() if engine in self._share.engines(each)), None)
            if target is None:
                return False
            self._targets_of[engine] = target
        return self._table.holds(target, time.monotonic())

    # ---------------------------------------------------------------- what others write

    async def follow(self, streams: JetStreamContext) -> None:
        """Take heartbeats and leases as they come, for good."""
        subject = f"$KV.{self._bucket}.>"
        async for messages in follow(streams, stream_of_bucket(self._bucket), subject, last_per_subject=True):
            for message in messages:
                await self._receive(message.subject.rpartition(f"{self._bucket}.")[2], message.body, message.sequence)
            self._is_read = self._is_read or not messages or messages[-1].pending == 0

    async def _receive(self, key: str, body: bytes, revision: int) -> None:
        now_s = time.monotonic()
        try:
            if key.startswith("agent."):
                heard = msgspec.json.decode(body, type=AgentRecord)
                if key == agent_key(heard.agent):  # else it speaks of another
                    self._table.receive_agent(heard, now_s)
                return
            if not key.startswith("engine."):
                return
            record = msgspec.json.decode(body, type=LeaseRecord)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            logger.error("the record %s of the bucket %s cannot be read: %s", key, self._bucket, error)
            return
        if record.major > BUS_MAJOR:
            logger.error("agent %s writes a newer version of leases than this release reads: update it", record.agent)
            return
        lost = self._table.receive_lease(key, record, revision, now_s)
        if lost:
            await self._lose(lost, record.agent)

    # ---------------------------------------------------------------- what this agent writes

    async def turn(self, streams: JetStreamContext) -> bool:
        """Send the heartbeat, and renew, acquire and hand over what is due. Raises NATS_ERRORS."""
        now_s = time.monotonic()
        scope = socket.gethostname()
        self._table.set_targets(
            {target: lease_key(scope if _is_local(target) else "", target) for target in self._share.targets()}
        )
        if now_s - self._heartbeat_s >= RENEW_LEASE_S and self._is_read:
            await self._beat(streams, self._table.heartbeat())
            self._heartbeat_s = now_s
            self._table.began(now_s)
        changed = [
            target
            for target in self._table.held()
            if (engines := self._share.engines(target)) and set(engines) != set(self._table.last_engines(target))
        ]
        for step in self._table.steps(time.monotonic(), changed):
            await self._take(streams, step)
        return False

    async def _beat(self, streams: JetStreamContext, record: AgentRecord) -> None:
        key = f"$KV.{self._bucket}.{agent_key(self._config.agent)}"
        await streams.publish(key, msgspec.json.encode(record), timeout=REQUEST_TIMEOUT_S)

    async def _take(self, streams: JetStreamContext, step: LeaseStep) -> None:
        began_s = time.monotonic()
        before = self._table.last_record(step.target)
        expected_engines = self._table.last_engines(step.target)
        engines = list(self._share.engines(step.target) or expected_engines)
        if step.action == "hand-over":
            await asyncio.to_thread(self._share.end, step.target)
            await self._sent(engines)
        if step.action == "hand-over":
            record = LeaseRecord("", "", engines, before=self._config.agent)
        else:
            record = LeaseRecord(self._config.agent, self._table.instance, engines)
        key = self._table.keys[step.target]
        revision = await compare_and_put(streams, self._bucket, key, msgspec.json.encode(record), step.revision)
        if not revision:
            return  # another was quicker: what it wrote is on its way here
        self._table.written(step, record, revision, began_s)
        if step.action == "acquire":
            await self._begin(streams, step.target, expected_engines, before)
        elif self._spool.holds_back():
            for engine in engines:  # no other agent held the lease since the last renewal: its revision is the same
                self._spool.confirm(engine)

    async def _begin(self, streams: JetStreamContext, target: str, engines: Sequence[str], before: LeaseRecord) -> None:
        for engine in engines:  # what an earlier run of this agent could not send, or what another has found since
            if before.agent == self._config.agent:
                self._spool.confirm(engine)
            else:
                self._spool.discard(engine)
        last = before.agent or before.before or self._config.agent
        expected = {engine: await left_behind(streams, self._config, engine, last, self._spool) for engine in engines}
        self._read_behind |= expected.keys()
        await asyncio.to_thread(self._share.begin, target, expected)
        if before.agent and before.agent != self._config.agent:
            self.taken_over += 1
            logger.warning("took over %s from agent %s, which has not renewed its lease", target, before.agent)
            for engine in engines:
                self._annotate(engine, "taken-over", f"agent {self._config.agent} took over from agent {before.agent}")

    async def _sent(self, engines: Sequence[str]) -> None:
        """Wait a moment until what was found is in the stream: the next holder reads there what is open."""
        until_s = time.monotonic() + SEND_WITHIN_S
        while self._spool.holds_findings(engines) and time.monotonic() < until_s:  # noqa: ASYNC110 (a database)
            await asyncio.sleep(0.05)

    async def _lose(self, target: str, holder: str) -> None:
        """Stop processing what another agent has taken over: what was found since the lease ended is that agent's."""
        engines = self._share.engines(target)
        await asyncio.to_thread(self._share.end, target)
        discarded = sum(self._spool.discard(engine) for engine in engines)
        for engine in engines:
            self._targets_of.pop(engine, None)
            self._read_behind.discard(engine)
        if not holder:
            return  # this agent's own handing over, received before the answer to it
        logger.warning(
            "agent %s has taken over %s: this one stops processing it, and drops %d messages from after its lease",
            holder,
            target,
            discarded,
        )

    async def hand_over_all(self, streams: JetStreamContext) -> None:
        """Hand every lease over: this agent ends. Raises NATS_ERRORS."""
        for step in self._table.last_steps():
            await self._take(streams, step)
        await self._beat(streams, msgspec.structs.replace(self._table.heartbeat(), leases=[]))


def _is_local(target: str) -> bool:
    host = target.rpartition("://")[2].rpartition("@")[2]
    return target.startswith("ipc:") or host.startswith(LOCAL_HOSTS)
