"""The connection of a hub: it follows a tenant's streams and leases, and asks the agents that have the engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Protocol

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext

from kvscope.monitor.bus.bus_config import BusConfig
from kvscope.monitor.bus.bus_connection import NATS_ERRORS, StreamMessage, follow, nats_error_text
from kvscope.monitor.bus.bus_messages import BUS_MAJOR, BusMessage, PointMessage
from kvscope.monitor.bus.bus_questions import (
    LAST_HEADER,
    OUTCOME_HEADER,
    PART_HEADER,
    REFUSED_WITH,
    QuestionMessage,
)
from kvscope.monitor.bus.bus_subjects import leases_bucket, leases_stream, question_subject
from kvscope.monitor.bus.fleet_owners import FleetOwners
from kvscope.monitor.bus.fleet_reader import FleetReader
from kvscope.monitor.bus.lease_table import AgentRecord, LeaseRecord
from kvscope.monitor.errors import Unreachable
from kvscope.monitor.events import limits

LATE_AGENT_S: Final = 15.0
"""An agent that wrote nothing for this long (three points and a lease) may be gone. Callers wait for it for
LATE_TIMEOUT_S.
"""
LATE_TIMEOUT_S: Final = 2.0
MARGIN_S: Final = 2.0
STATUS_HEADER: Final = "Status"
NO_RESPONDERS: Final = "503"


class BusCompanion(Protocol):
    """Something beside a hub's questions that stands on its connection: alerts."""

    def take(self, taken: BusMessage, message: StreamMessage) -> None:
        """Take a message of the streams."""
        ...

    def take_record(self, key: str, message: StreamMessage) -> None:
        """Take a record of the bucket."""
        ...

    async def keep(self, streams: JetStreamContext) -> None:
        """Run while connected, and never return."""
        ...

    async def hand_over(self, streams: JetStreamContext) -> None:
        """Run once at the end, if there ever was a connection."""
        ...


class FleetLink(FleetReader):
    """Follows and asks for one tenant. Thread-safe."""

    def __init__(self, config: BusConfig) -> None:
        super().__init__(config)
        self.owners = FleetOwners()
        self.asked: Counter[str] = Counter()
        """Questions by outcome: ok, a refusal, or unanswered."""
        self.companion: BusCompanion | None = None
        """Another user of the connection, set before it starts."""
        self._silent: dict[str, str] = {}
        """Why agents did not answer when they were asked last."""
        self._open_questions = 0
        self._held_bytes = 0

    # ---------------------------------------------------------------- what is followed

    async def work(self, streams: JetStreamContext) -> None:
        """Follow streams and leases."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().work(streams))
            tasks.create_task(self._follow_leases(streams))
            if self.companion is not None:
                tasks.create_task(self.companion.keep(streams))

    async def finish(self, streams: JetStreamContext) -> None:
        """Let the companion end."""
        if self.companion is not None:
            await self.companion.hand_over(streams)

    def received(self, taken: BusMessage, message: StreamMessage) -> None:
        """Note which agent sent a point."""
        if self.companion is not None:
            self.companion.take(taken, message)
        if isinstance(taken, PointMessage):
            self.owners.take(taken.engine.engine, taken.agent, message.stored_s)
            self.owners.see(taken.agent, message.stored_s)

    async def _follow_leases(self, streams: JetStreamContext) -> None:
        bucket = leases_bucket(self.config.tenant)
        stream = leases_stream(self.config.tenant)
        async for messages in follow(streams, stream, f"$KV.{bucket}.>", last_per_subject=True):
            with self._lock:
                for message in messages:
                    key = message.subject.rpartition(f"{bucket}.")[2]
                    self.receive_record(key, message)
                    if self.companion is not None:
                        self.companion.take_record(key, message)

    def receive_record(self, key: str, message: StreamMessage) -> None:
        """Take a record of the bucket. An unreadable record, or one of a newer version, changes nothing."""
        kind = {"agent": AgentRecord, "engine": LeaseRecord}.get(key.partition(".")[0])
        if kind is None or not message.body:
            return
        try:
            record = msgspec.json.decode(message.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if record.major > BUS_MAJOR:
            return
        if record.agent:
            self.owners.see(record.agent, message.stored_s)
        for engine in record.engines if isinstance(record, LeaseRecord) else ():
            self.owners.take(engine, record.agent, message.stored_s)

    def agent_age_s(self, agent: str) -> float:
        """Return how long ago an agent wrote something last."""
        return max(0.0, time.time() - self.owners.last_seen_s(agent))

    def silence_of(self, agent: str) -> str:
        """Return why an agent did not answer when it was asked last, empty if it did."""
        return self._silent.get(agent, "")

    # ---------------------------------------------------------------- what is asked

    def ask(self, agent: str, question: str, arguments: Mapping[str, Any], timeout_s: float) -> bytes:
        """Return an agent's answer as JSON. Raises what the agent refused with, and Unreachable if it does not answer.

        Not to be called from the connection's own thread.
        """
        if self._client is None or self._loop is None or not self._client.is_connected:
            raise Unreachable(f"this hub has no connection to NATS, and cannot ask agent {agent}")
        if self.agent_age_s(agent) > LATE_AGENT_S:
            timeout_s = min(timeout_s, LATE_TIMEOUT_S)
        asked = QuestionMessage(
            hub=self.config.agent, question=question, arguments=dict(arguments), timeout_s=timeout_s
        )
        waiting = asyncio.run_coroutine_threadsafe(self._ask(self._client, agent, asked), self._loop)
        try:
            return waiting.result(timeout_s + MARGIN_S)
        except FutureTimeout as error:
            waiting.cancel()
            raise Unreachable(f"agent {agent} did not answer within {timeout_s:g} s") from error

    async def _ask(self, client: Client, agent: str, asked: QuestionMessage) -> bytes:
        if self._open_questions >= limits.HUB_QUESTIONS:
            raise Unreachable(f"this hub waits for {self._open_questions} answers already: ask again later")
        self._open_questions += 1
        try:
            outcome, answer = await self._exchange(client, agent, asked)
        except (*NATS_ERRORS, Unreachable) as error:
            self.asked["unanswered"] += 1
            text = str(error) if isinstance(error, Unreachable) else nats_error_text(error)
            self._silent[agent] = text
            raise Unreachable(text) from error
        finally:
            self._open_questions -= 1
        self.asked[outcome] += 1
        self._silent.pop(agent, None)
        if outcome == "ok":
            return answer
        text = answer.decode(errors="replace")
        raise REFUSED_WITH.get(outcome, Unreachable)(f"agent {agent}: {text}" if outcome == "refused" else text)

    async def _exchange(self, client: Client, agent: str, asked: QuestionMessage) -> tuple[str, bytes]:
        """Send a question and put the parts of its answer together. Return its outcome and its bytes. Raises
        NATS_ERRORS and Unreachable.
        """
        replies = await client.subscribe(client.new_inbox())
        parts: list[bytes] = []
        try:
            subject = question_subject(self.config.tenant, agent)
            await client.publish(subject, msgspec.json.encode(asked), reply=replies.subject)
            until_s = time.monotonic() + asked.timeout_s
            while True:
                try:
                    message = await replies.next_msg(max(0.001, until_s - time.monotonic()))
                except NatsTimeout as error:
                    raise Unreachable(
                        f"agent {agent} did not answer within {asked.timeout_s:g} s: it may be stopped, cut off or busy"
                    ) from error
                self._add(agent, message, parts)
                headers = message.headers or {}
                if LAST_HEADER in headers:
                    return headers.get(OUTCOME_HEADER, "refused"), b"".join(parts)
        finally:
            self._held_bytes -= sum(map(len, parts))
            if client.is_connected:
                await replies.unsubscribe()

    def _add(self, agent: str, message: Msg, parts: list[bytes]) -> None:
        """Take a part of an answer. Raises Unreachable for one that is missing, and beyond the limits."""
        headers = message.headers or {}
        if headers.get(STATUS_HEADER) == NO_RESPONDERS:
            raise Unreachable(f"agent {agent} does not answer: it is not connected to NATS")
        if headers.get(PART_HEADER) != str(len(parts)):
            raise Unreachable(f"a part of the answer of agent {agent} was lost: ask again")
        parts.append(message.data)
        self._held_bytes += len(message.data)
        if sum(map(len, parts)) > limits.BUS_ANSWER_BYTES + 1 or self._held_bytes > limits.HUB_ANSWERS_BYTES:
            raise Unreachable(f"the answer of agent {agent} is longer than this hub can hold now: ask for less")
