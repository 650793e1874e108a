"""Answers the questions that hubs send to this agent, from its ledgers and history, a few at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from ..base import limits
from ..base.errors import BadQuestion, KvscopeError, Unreachable
from ..questions.query import QUESTIONS, Query
from .bus_config import BusConfig
from .bus_connection import NATS_ERRORS, nats_error_text
from .bus_questions import (
    ANSWER_PART_BYTES,
    LAST_HEADER,
    OUTCOME_HEADER,
    PART_HEADER,
    Outcome,
    QuestionMessage,
    decode_bus_question,
    outcome_of,
)
from .bus_subjects import answer_prefix, question_subject

logger = logging.getLogger(__name__)

ANSWERING_THREADS: Final = 4
"""Questions answered at once: the engines' readers have the same processor."""
MAX_TIMEOUT_S: Final = 60.0

Extra = Callable[[dict[str, Any], float], bytes | bytearray]
"""Answers a question beside those of `Query`, from its arguments within so many seconds, as JSON."""


class _Reply(NamedTuple):
    outcome: Outcome
    payload: bytes | bytearray


class AgentAnswers:
    """Takes the questions to `config.agent` and asks `query`. `extras` are further questions by name."""

    def __init__(self, config: BusConfig, query: Query, extras: dict[str, Extra] | None = None) -> None:
        self.counts: Counter[str] = Counter()
        """Questions by outcome."""
        self._config = config
        self._query = query
        self._extras = extras or {}
        self._threads = ThreadPoolExecutor(ANSWERING_THREADS, thread_name_prefix="kvscope-answers")
        self._waiting = 0

    def close(self) -> None:
        """Take no more questions. A question in progress ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def serve(self, client: Client) -> None:
        """Answer until cancelled."""
        asked = await client.subscribe(
            question_subject(self._config.tenant, self._config.agent),
            pending_msgs_limit=limits.BUS_AGENT_QUESTIONS,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                async for message in asked.messages:
                    if not message.reply.startswith(f"{answer_prefix(self._config.tenant, self._config.agent)}."):
                        continue  # an answer goes to a hub of this tenant, and nowhere else
                    if self._waiting >= limits.BUS_AGENT_QUESTIONS:
                        busy = f"agent {self._config.agent} has {self._waiting} questions to answer: ask again later"
                        await self._send(client, message.reply, _Reply("refused", busy.encode()))
                        continue
                    self._waiting += 1
                    tasks.create_task(self._take(client, message, time.monotonic()))
        finally:
            if client.is_connected:
                await asked.unsubscribe()

    async def _take(self, client: Client, message: Msg, received_s: float) -> None:
        try:
            loop = asyncio.get_running_loop()
            reply = await loop.run_in_executor(self._threads, self._reply_to, message.data, received_s)
            await self._send(client, message.reply, reply)
        except NATS_ERRORS as error:
            logger.warning("an answer could not be sent: %s", nats_error_text(error))
        finally:
            self._waiting -= 1

    def _reply_to(self, payload: bytes, received_s: float) -> _Reply:
        try:
            asked = decode_bus_question(payload)
            until_s = received_s + min(asked.timeout_s, MAX_TIMEOUT_S)
            if time.monotonic() > until_s:
                raise Unreachable("the question waited longer than its answer was wanted for")
            answer = self._answer(asked, until_s)
            if len(answer) > limits.BUS_ANSWER_BYTES:
                raise Unreachable(
                    f"the answer has {len(answer):,} bytes, and {limits.BUS_ANSWER_BYTES:,} travel over the bus: ask"
                    " for a shorter window, or ask the agent itself"
                )
        except (KvscopeError, msgspec.ValidationError) as error:
            return _Reply(outcome_of(error), str(error).encode())
        except Exception:
            logger.exception("a question of a hub could not be answered")
            return _Reply("refused", b"the agent could not answer: see its log for the reason")
        return _Reply("ok", answer)

    def _answer(self, asked: QuestionMessage, until_s: float) -> bytes | bytearray:
        """Return the answer as JSON. Raises what `Query` raises."""
        extra = self._extras.get(asked.question)
        if extra is not None:
            return extra(asked.arguments, until_s - time.monotonic())
        question = QUESTIONS.get(asked.question)
        if question is None:
            raise BadQuestion(
                f"agent {self._config.agent} does not know the question {asked.question[:80]}: it runs another release"
            )
        arguments = msgspec.structs.asdict(msgspec.convert(asked.arguments, question.parameters))
        return msgspec.json.encode(self._query.answer(question, arguments))

    async def _send(self, client: Client, to: str, reply: _Reply) -> None:
        """Send a reply in parts. Raises NATS_ERRORS."""
        self.counts[reply.outcome] += 1
        view = memoryview(reply.payload)  # an answer is long: no second copy of it
        starts = range(0, max(len(reply.payload), 1), ANSWER_PART_BYTES)
        for number, start in enumerate(starts):
            headers = {PART_HEADER: str(number)}
            if number == len(starts) - 1:
                headers |= {LAST_HEADER: "1", OUTCOME_HEADER: reply.outcome}
            await client.publish(to, bytes(view[start : start + ANSWER_PART_BYTES]), headers=headers)
            await client.flush()  # one part at a time: a slow link holds up this answer and nothing else
