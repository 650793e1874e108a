"""The replay socket: its protocol, and a server within bounds. Whatever clients ask, the engine does not feel it.

Four bounds, all in kvscope.monitor.base.limits. A turn takes a fixed number of questions. A client has at most
UNREAD_ANSWERS waiting for it. Answers draw on a budget of bytes a second, one for each client and one for all. And a
keyframe, the expensive answer, is made at most once a second, one for all clients, which share its memory. A client
that asks for one again and again gets the next after 1, 2, 4, 4, … s. A question beyond a bound is dropped and counted
by reason. A reader asks again after a second.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple, TypeAlias

import msgspec
import zmq

from ..base import limits
from ..contract.wire import ContractError

logger = logging.getLogger(__name__)

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


BURST_S: Final = 2.0
CLIENT_COST: Final = 1 << 20
"""The least that an answer costs a client, so that short ones are bounded too: 32 a second."""
SHARED_COST: Final = 1 << 16
"""The least that an answer costs of what all clients have together."""
MAX_CLIENTS: Final = 1_024
"""Clients remembered. The one that asked longest ago is forgotten first."""
WARN_EVERY_NS: Final = 60_000_000_000
NO_ANSWER: Final = Replay("", "none", -1, -1, False, 0)


class ReplayAnswer(NamedTuple):
    """The answer to a question: a header, and the frames after it."""

    header: Replay
    frames: list[bytes]


class SharedKeyframe(NamedTuple):
    """A keyframe in memory of ZeroMQ's own, which counts its references: many clients are sent the same bytes."""

    header: Replay
    frame: zmq.Frame
    made_ns: int


class ByteBudget:
    """Bytes that may be spent: refilled by `per_s` up to BURST_S of it. The last to spend may overdraw it."""

    def __init__(self, per_s: int, now_ns: int) -> None:
        self.per_s = per_s
        self._left = per_s * BURST_S
        self._at_ns = now_ns

    def has_any(self, now_ns: int) -> bool:
        """Whether anything is left."""
        self._left = min(self.per_s * BURST_S, self._left + self.per_s * (now_ns - self._at_ns) / 1e9)
        self._at_ns = now_ns
        return self._left > 0

    def spend(self, size: int) -> None:
        """Take that many bytes out."""
        self._left -= size


class ReplayClient:
    """A peer of the replay socket."""

    def __init__(self, now_ns: int) -> None:
        self.budget = ByteBudget(limits.CLIENT_BYTES_PER_S, now_ns)
        self.keyframe_ns = 0
        """When the last keyframe that it was sent was made: it gets each only once."""
        self.next_keyframe_ns = now_ns
        """When it may be sent another."""
        self._wait_ns = limits.KEYFRAME_INTERVAL_NS

    def took_keyframe(self, made_ns: int, now_ns: int) -> None:
        """Postpone the next keyframe: by twice as long as the last time, until KEYFRAME_WAIT_NS."""
        self.keyframe_ns = made_ns
        self.next_keyframe_ns = now_ns + self._wait_ns
        self._wait_ns = min(self._wait_ns * 2, limits.KEYFRAME_WAIT_NS)


class ReplayServer:
    """Answers questions that come to `endpoint` with what `find` and `keyframe` give. One thread only.

    find: the batches of an epoch from a sequence on, or None where only a keyframe helps. keyframe: the state now, or
    None before there is one, made at most every `keyframe_ns`. Raises zmq.ZMQError if the endpoint cannot be bound.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        find: Callable[[int, int], ReplayAnswer | None],
        keyframe: Callable[[], ReplayAnswer | None],
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        keyframe_ns: int = limits.KEYFRAME_INTERVAL_NS,
    ) -> None:
        self.dropped: Counter[str] = Counter()
        """Questions that got no answer, by reason."""
        self._find = find
        self._make_keyframe = keyframe
        self._monotonic_ns = monotonic_ns
        self._keyframe_ns = keyframe_ns
        self._clients: OrderedDict[bytes, ReplayClient] = OrderedDict()
        self._shared = ByteBudget(limits.ALL_CLIENTS_BYTES_PER_S, monotonic_ns())
        self._keyframe: SharedKeyframe | None = None
        self._warned_ns = monotonic_ns() - WARN_EVERY_NS
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, limits.UNREAD_ANSWERS)
        self._socket.setsockopt(zmq.RCVHWM, limits.QUESTIONS_PER_TURN)
        self._socket.setsockopt(zmq.MAXMSGSIZE, limits.REQUEST_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a full queue refuses, and does not swallow
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self, timeout_s: float) -> bool:
        """Wait for questions, take QUESTIONS_PER_TURN at most, and answer those that the bounds allow.

        Whether there were any.
        """
        asked = self._socket.poll(max(0, round(timeout_s * 1000)))
        if self._keyframe is not None and not self._is_current(self._keyframe.made_ns):
            self._keyframe = None
        if not asked:
            return False
        now = self._monotonic_ns()
        for _ in range(limits.QUESTIONS_PER_TURN):
            try:
                identity, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            reason = self._take(identity, parts, now)
            if reason:
                self.dropped[reason] += 1
        self._warn(now)
        return True

    def _take(self, identity: bytes, parts: list[bytes], now_ns: int) -> str:
        """Answer one message, or return the reason why it gets no answer."""
        client = self._client(identity, now_ns)
        if not client.budget.has_any(now_ns) or not self._shared.has_any(now_ns):
            return "asked too often"
        client.budget.spend(CLIENT_COST)
        self._shared.spend(SHARED_COST)
        try:
            question = decode_question(parts[-1] if parts else b"")
        except NotAQuestion:
            return "not a question"
        if isinstance(question, AskKeyframe):
            if self._is_current(client.keyframe_ns):
                return "it has this keyframe"
            if now_ns < client.next_keyframe_ns:
                return "it asked for another keyframe too soon"
        try:  # before the answer is made: for a client whose queue is full, none is
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
        except zmq.Again:
            return "earlier answers are not read"
        except zmq.ZMQError:
            return "it has gone"
        self._reply(client, question)
        return ""

    def _client(self, identity: bytes, now_ns: int) -> ReplayClient:
        client = self._clients.get(identity)
        if client is None:
            client = self._clients[identity] = ReplayClient(now_ns)
            if len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
        self._clients.move_to_end(identity)
        return client

    def _reply(self, client: ReplayClient, question: ReplayQuestion) -> None:
        """Send the rest of a message whose first part, the client's identity, is sent."""
        parts: list[bytes | zmq.Frame] = [msgspec.msgpack.encode(NO_ANSWER)]
        size = 0
        try:
            found = self._find(question.epoch, question.sequence) if isinstance(question, AskSince) else None
            shared = self._current() if found is None else None
            if found is not None:
                parts = [msgspec.msgpack.encode(found.header), *found.frames]
                size = sum(map(len, found.frames))
            elif shared is not None:
                header, later = self._with_later(shared.header, question)
                parts = [msgspec.msgpack.encode(header), shared.frame, *later]
                size = len(shared.frame) + sum(map(len, later))
                client.took_keyframe(shared.made_ns, self._monotonic_ns())
        finally:  # a message that was begun must end
            client.budget.spend(max(0, size - CLIENT_COST))
            self._shared.spend(max(0, size - SHARED_COST))
            for number, part in enumerate(parts, 1):
                self._socket.send(part, zmq.SNDMORE * (number < len(parts)), copy=not isinstance(part, zmq.Frame))

    def _with_later(self, header: Replay, question: ReplayQuestion) -> tuple[Replay, list[bytes]]:
        """Return the header of a keyframe that is sent now, and the batches since it was made."""
        asked = "since" if isinstance(question, AskSince) else "keyframe"
        later = self._find(header.epoch, header.last + 1)
        if later is None:
            return msgspec.structs.replace(header, asked=asked), []
        last, more = max(header.last, later.header.last), later.header.more
        return msgspec.structs.replace(header, asked=asked, last=last, more=more), later.frames

    def _current(self) -> SharedKeyframe | None:
        """Return the keyframe of the last second, or a new one."""
        if self._keyframe is None:
            made = self._make_keyframe()
            now = self._monotonic_ns()
            self._keyframe = made and SharedKeyframe(made.header, zmq.Frame(made.frames[0], copy=True), now)
        return self._keyframe

    def _is_current(self, made_ns: int) -> bool:
        return bool(made_ns) and self._monotonic_ns() - made_ns < self._keyframe_ns

    def _warn(self, now_ns: int) -> None:
        if self.dropped and now_ns - self._warned_ns >= WARN_EVERY_NS:
            self._warned_ns = now_ns
            reasons = ", ".join(f"{count:,} ({reason})" for reason, count in self.dropped.most_common())
            logger.warning("the replay socket dropped questions since it began: %s", reasons)
