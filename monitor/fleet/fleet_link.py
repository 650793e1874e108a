"""The connection of a hub: it follows a tenant's streams and leases, and asks the agents that have the engines."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Protocol

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext

from ..base import limits
from ..base.errors import Unreachable
from .bus_config import BusConfig
from .bus_connection import NATS_ERRORS, REQUEST_TIMEOUT_S, StreamMessage, nats_error_text
from .bus_messages import BusMessage, FindingMessage
from .bus_questions import LAST_HEADER, OUTCOME_HEADER, PART_HEADER, REFUSED_WITH, QuestionMessage
from .bus_subjects import answer_prefix, hubs_bucket, question_subject
from .fleet_fold import ToldFinding
from .fleet_owners import FleetOwners, owner_key
from .fleet_reader import FleetReader

logger = logging.getLogger(__name__)

LATE_AGENT_S: Final = 15.0
"""An agent that wrote nothing for this long (three points and a lease) may be gone. Callers wait for it for
LATE_TIMEOUT_S.
"""
LATE_TIMEOUT_S: Final = 2.0
MARGIN_S: Final = 2.0
OWNERS_EVERY_S: Final = 1.0
STATUS_HEADER: Final = "Status"
NO_RESPONDERS: Final = "503"


class BusCompanion(Protocol):
    """Something beside a hub's questions that stands on its connection: alerts."""

    def take(self, told: ToldFinding) -> None:
        """Take a transition that counts."""
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
        self.asked: Counter[str] = Counter()
        """Questions by outcome: ok, a refusal, or unanswered."""
        self.companion: BusCompanion | None = None
        """Another user of the connection, set before it starts."""
        self._silent: dict[str, str] = {}
        """Why agents did not answer when they were asked last."""
        self._open_questions = 0
        self._held_bytes = 0

    # ---------------------------------------------------------------- what is followed

    @property
    def owners(self) -> FleetOwners:
        """Which agent owns each engine. Not to be asked while the fold is lent."""
        return self._fold.owners

    async def work(self, streams: JetStreamContext) -> None:
        """Follow streams and buckets, and write there who owns an engine."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().work(streams))
            tasks.create_task(self._write_owners(streams))
            if self.companion is not None:
                tasks.create_task(self.companion.keep(streams))

    async def finish(self, streams: JetStreamContext) -> None:
        """Let the companion end."""
        if self.companion is not None:
            await self.companion.hand_over(streams)

    def received(self, taken: BusMessage, message: StreamMessage) -> None:
        """Hand a transition on."""
        if isinstance(taken, FindingMessage):
            self.received_transition(ToldFinding(taken, message.sequence, message.stored_s, message.arrived_s()))

    def received_transition(self, told: ToldFinding) -> None:
        """Hand a transition on."""
        if self.companion is not None:
            self.companion.take(told)

    def received_record(self, key: str, message: StreamMessage) -> None:
        """Take a record of a bucket. A companion's is among them."""
        super().received_record(key, message)
        if self.companion is not None:
            self.companion.take_record(key, message)

    async def _write_owners(self, streams: JetStreamContext) -> None:
        """Keep who owns an engine, for hubs that start later: they could not know who was there first."""
        bucket = hubs_bucket(self.config.tenant)
        while True:
            with self._lock:
                changed = self.owners.take_unwritten() if self.is_complete else []
            for number, owner in enumerate(changed):
                try:
                    subject = f"$KV.{bucket}.{owner_key(owner.engine)}"
                    await streams.publish(subject, msgspec.json.encode(owner), timeout=REQUEST_TIMEOUT_S)
                except NATS_ERRORS as error:
                    logger.error("the owners of engines cannot be written just now: %s", nats_error_text(error))
                    with self._lock:
                        self.owners.give_back(changed[number:])
                    break
            await asyncio.sleep(OWNERS_EVERY_S)

    def agent_age_s(self, agent: str) -> float:
        """Return how long ago something of an agent arrived last."""
        return time.monotonic() - self.owners.heard_s(agent)

    def silence_of(self, agent: str) -> str:
        """Return why an agent did not answer when it was asked last, empty if it did."""
        return self._silent.get(agent, "")

    # ---------------------------------------------------------------- what is asked

    def ask(self, agent: str, question: str, arguments: Mapping[str, Any], timeout_s: float) -> bytearray:
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

    async def _ask(self, client: Client, agent: str, asked: QuestionMessage) -> bytearray:
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

    async def _exchange(self, client: Client, agent: str, asked: QuestionMessage) -> tuple[str, bytearray]:
        """Send a question and put the parts of its answer together. Return its outcome and its bytes. Raises
        NATS_ERRORS and Unreachable.
        """
        reply = f"{answer_prefix(self.config.tenant, agent)}.{uuid.uuid4().hex}"
        replies = await client.subscribe(reply)
        answer = bytearray()  # 32 MiB may come: parts and their sum would be twice that
        parts = 0
        try:
            subject = question_subject(self.config.tenant, agent)
            await client.publish(subject, msgspec.json.encode(asked), reply=reply)
            until_s = time.monotonic() + asked.timeout_s
            while True:
                try:
                    message = await replies.next_msg(max(0.001, until_s - time.monotonic()))
                except NatsTimeout as error:
                    raise Unreachable(
                        f"agent {agent} did not answer within {asked.timeout_s:g} s: it may be stopped, cut off or busy"
                    ) from error
                if message.subject != reply:
                    continue  # another agent let a stream deliver a message of its own here
                self._add(agent, message, answer, parts)
                parts += 1
                headers = message.headers or {}
                if LAST_HEADER in headers:
                    return headers.get(OUTCOME_HEADER, "refused"), answer
        finally:
            self._held_bytes -= len(answer)
            if client.is_connected:
                await replies.unsubscribe()

    def _add(self, agent: str, message: Msg, answer: bytearray, parts: int) -> None:
        """Take the next part of an answer. Raises Unreachable for one that is missing, and beyond the limits."""
        headers = message.headers or {}
        if headers.get(STATUS_HEADER) == NO_RESPONDERS:
            raise Unreachable(f"agent {agent} does not answer: it is not connected to NATS")
        if headers.get(PART_HEADER) != str(parts):
            raise Unreachable(f"a part of the answer of agent {agent} was lost: ask again")
        answer += message.data
        self._held_bytes += len(message.data)
        if len(answer) > limits.BUS_ANSWER_BYTES + 1 or self._held_bytes > limits.HUB_ANSWERS_BYTES:
            raise Unreachable(f"the answer of agent {agent} is longer than this hub can hold now: ask for less")
