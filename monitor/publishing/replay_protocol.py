"""The protocol between the replay socket and its clients: questions, and the header of an answer."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from kvscope.monitor.events import limits
from kvscope.monitor.events.wire import ContractError

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class AskKeyframe(msgspec.Struct, array_like=True, frozen=True, tag="keyframe"):
    """`["keyframe"]`: the state now."""


class AskSince(msgspec.Struct, array_like=True, frozen=True, tag="since"):
    """`["since", epoch, sequence]`: the batches of that epoch from `sequence` on."""

    epoch: _Count
    sequence: _Count


ReplayQuestion: TypeAlias = AskKeyframe | AskSince


class Replay(msgspec.Struct):
    """The header of an answer: what it answers, where the frames after it came from, and which batches they are."""

    asked: str
    source: str
    first: int
    last: int
    more: bool
    epoch: int


class NotAQuestion(ContractError):
    """The bytes are no question that the replay socket knows."""


_QUESTION_ENCODER: Final = msgspec.msgpack.Encoder()
_QUESTION_DECODER: Final = msgspec.msgpack.Decoder(AskKeyframe | AskSince)


def encode_question(question: ReplayQuestion) -> bytes:
    """Return the question as bytes."""
    return _QUESTION_ENCODER.encode(question)


def decode_question(payload: bytes | memoryview) -> ReplayQuestion:
    """Return the question in `payload`. Raises NotAQuestion for anything else, however long or nested it is."""
    if len(payload) > limits.QUESTION_BYTES:
        raise NotAQuestion(f"a question of {len(payload)} bytes: {limits.QUESTION_BYTES} are allowed")
    try:
        question: ReplayQuestion = _QUESTION_DECODER.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotAQuestion(f"not a question: {error}") from error
    return question
