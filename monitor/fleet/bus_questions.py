"""Questions that a hub sends to the agent that has an engine, and answers in parts, as core NATS messages.

A question is JSON with a version. An answer is one or more messages: PART_HEADER numbers them from 0, LAST_HEADER is on
the last, and that one has OUTCOME_HEADER. The parts of outcome `ok` make the answer's JSON, those of any other a text.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from ..base.errors import BadQuestion, BadTime, ContractError, KvscopeError, NotKnown, Unreachable
from .bus_messages import BUS_MAJOR, BUS_MINOR

Outcome = Literal["ok", "not-known", "bad-question", "bad-time", "refused"]
PART_HEADER: Final = "kvscope-part"
LAST_HEADER: Final = "kvscope-last"
OUTCOME_HEADER: Final = "kvscope-outcome"
ANSWER_PART_BYTES: Final = 1 << 18
"""NATS takes messages of up to 1 MiB by default."""
REFUSED_WITH: Final[dict[str, type[KvscopeError]]] = {
    "not-known": NotKnown,
    "bad-question": BadQuestion,
    "bad-time": BadTime,
    "refused": Unreachable,
}
"""The exception for each outcome but `ok`. refused: too many questions, too long an answer, or too late."""


class QuestionMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A question of query.py with its arguments, or `sql`. The answer is wanted within `timeout_s`."""

    hub: str
    question: str
    arguments: dict[str, Any]
    timeout_s: float
    major: int = BUS_MAJOR
    minor: int = BUS_MINOR


def decode_bus_question(payload: bytes) -> QuestionMessage:
    """Return the question in `payload`. Raises ContractError."""
    try:
        asked = msgspec.json.decode(payload, type=QuestionMessage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ContractError(f"not a question of the bus: {error}") from error
    if asked.major > BUS_MAJOR:
        raise ContractError(f"a question of version {asked.major}: this agent's release answers {BUS_MAJOR}")
    return asked


def outcome_of(error: Exception) -> Outcome:
    """Return the outcome that reports an exception."""
    if isinstance(error, BadTime):
        return "bad-time"
    if isinstance(error, BadQuestion | msgspec.ValidationError):
        return "bad-question"
    return "not-known" if isinstance(error, NotKnown) else "refused"
