"""A live event stream: joins in the middle, notices gaps, and has them filled or reports the loss.

It subscribes first and keeps what comes, asks for a keyframe, and splices the two (law 7). A gap is requested by
sequence. The engine answers from its ring, or else its journal, or else with a keyframe, and then the batches between
are reported as lost (a LOST record). While nothing is received, an OBSERVED record a second keeps time passing.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import msgspec
import zmq

from ..base import limits
from ..contract.event_log import Clock
from ..contract.kinds import Kind, Layer, Stage
from ..contract.samples import Record
from ..contract.wire import (
    STACK_TEXT,
    Batch,
    ContractError,
    Frame,
    Keyframe,
    NewerVersion,
    Run,
    batch_of,
    decode,
    encode,
    is_alive,
)
from ..probes.publisher import replay_endpoint_for
from ..probes.replay_server import AskKeyframe, AskSince, Replay, ReplayQuestion, encode_question
from ..probes.stall_capture import read_dump, stack_file
from .kv_event_stream import KvEventSource, is_kv_batch, kv_endpoint_at
from .source import POLL_WAIT_S, Source, SourceOptions, SourceStatus, nothing_known
from .source_sockets import SourceSockets
from .targets import SOURCES_PATH, TargetKind

ASK_AGAIN_NS: Final = 1_000_000_000
OBSERVE_NS: Final = 1_000_000_000
SILENT_NS: Final = 3_000_000_000
"""After so long without a frame of an engine its stack may be in a file: its thread holds the GIL."""
PAUSED_NS: Final = 1_000_000_000
"""A turn that takes so much longer than it may wait: this process was paused, or the machine was."""
LISTEN_NS: Final = 1_000_000_000
"""So long after a pause what was sent meanwhile may still be on its way here. It says nothing about the engine."""
EARLY_BATCHES: Final = 64
"""An epoch first met within so many batches is received from its beginning, not from a keyframe: an engine sends 20 a
second, and it takes a reader a second or two to connect.
"""
TAKEOVER_NS: Final = 5_000_000_000
"""An epoch that is silent for so long may be followed by one with an earlier clock: longer than ledgers wait for it."""


class Received(NamedTuple):
    """A frame in its position, to be applied, and its bytes, to be kept."""

    frame: Frame
    payload: bytes


class LiveStream(Source):
    """The stream at `events`, with `replay` beside it unless given. One thread only. Raises ContractError for what is
    no endpoint.

    `known` returns the next batch that the ledger of an engine's epoch lacks: the stream begins there if the engine
    still has it. -1: nothing was received of it before. `unkept` returns the first batch that no history has, -1 if
    that is not known: without a ledger the stream begins there, too, and a keyframe follows the batches that are late.
    0: earlier epochs of the engine are kept, so that nothing of this one may be missing.
    """

    has_events = True

    def __init__(
        self,
        events: str,
        replay: str = "",
        clock: Clock = time,
        known: Callable[[str, int], int] = nothing_known,
        unkept: Callable[[str, int], int] = nothing_known,
    ) -> None:
        self.events = events
        self.replay = replay or replay_endpoint_for(events)
        self.engine = ""
        self.bad_frames = 0
        """Messages that were no frame of the contract, counted and left out."""
        self.filled_from: dict[str, int] = {}
        """How many batches came late, by where from: ring or journal."""
        self.lag_s: float | None = None
        """From when the newest frame was packed, by the engine's clock, until we had it."""
        self.has_kv_events = False
        """Whether it is vLLM's KV events that are published there: monitor/sources/kv_event_stream.py reads them."""
        self._clock = clock
        self._known = known
        self._unkept = unkept
        self._lacks_state = False
        """Whether batches come that no ledger can use before a keyframe."""
        self._is_held = False
        """Whether a keyframe was asked for, so that what follows the last batch put out has to wait for it."""
        self._keyframe: Received | None = None
        """It has come, and is due behind its last batch."""
        self._epoch = 0
        self._follows_epoch = False
        """Whether an earlier epoch was received, so that nothing of this one may be missing."""
        self._next = -1
        self._behind = False
        """Whether batches since an earlier reader's last one are still to come: time does not pass before them."""
        self._more = False
        self._unreadable = False
        """Whether a batch that is missing came, and could not be read: only a keyframe leads past it."""
        self._waiting: deque[Received] = deque()
        self._asked_ns = 0
        self._asked_for = -2
        self._ahead: list[Received] = []
        """Batches beyond a gap that had come when the missing ones were asked for."""
        self._observed_ns = self._received_ns = self._turned_ns = self._listening_ns = clock.monotonic_ns()
        self._turned_at_ns = clock.time_ns()
        self._stack: tuple[Layer, str] | None = None
        self._newer: NewerVersion | None = None
        self._payloads: dict[int, bytes] = {}
        self._last_ns = 0
        self._connect()

    def _connect(self) -> None:
        """Connect both sockets. Raises ContractError for what is not an endpoint."""
        self._sockets = SourceSockets()
        try:
            self._sub = self._sockets.add(zmq.SUB)
            self._sub.setsockopt(zmq.RCVHWM, limits.UNREAD_MESSAGES)
            self._sub.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)
            self._sub.setsockopt(zmq.SUBSCRIBE, b"")
            self._sub.connect(self.events)
            self._dealer = self._sockets.add(zmq.DEALER)
            self._dealer.setsockopt(zmq.SNDHWM, 4)
            self._dealer.setsockopt(zmq.MAXMSGSIZE, limits.FRAME_BYTES)
            self._dealer.connect(self.replay)
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ContractError(
                f"{self.events} is not an endpoint to connect to: {error.strerror}; one looks like tcp://127.0.0.1:5757"
            ) from error

    def close(self) -> None:
        """Disconnect."""
        self._sockets.close()

    @property
    def in_step(self) -> bool:
        """Whether the state is known and nothing is missing just now."""
        return self._next >= 0 and not (self._waiting or self._unreadable or self._lacks_state)

    def restart(self, *, from_keyframe: bool = False) -> None:
        """Go on from the ledger's state. Records that it could not take in twice are left out, and lost."""
        if not self.engine:
            return
        self._next = max(self._known(self.engine, self._epoch), -1)
        self._unreadable = from_keyframe and self._next >= 0
        self._waiting.clear()
        self._asked_for = -2

    def poll(self, timeout_s: float = POLL_WAIT_S) -> list[Frame]:
        """Return the frames that have come, in order and without gaps. Raises NewerVersion."""
        received = self.receive(timeout_s)
        self._payloads = {id(each.frame): each.payload for each in received}
        return [each.frame for each in received]

    def payload_of(self, frame: Frame) -> bytes:
        """Return the bytes of a frame from the latest poll, as the engine sent them."""
        return self._payloads.get(id(frame)) or encode(frame)

    def status(self) -> SourceStatus:
        """Report how the stream is."""
        notes = [f"{self.bad_frames} messages were not of the contract and were left out"] if self.bad_frames else []
        return SourceStatus(
            target=self.events,
            kind=TargetKind.STREAM,
            engines=(self.engine,) if self.engine else (),
            in_step=self.in_step,
            skipped=self.bad_frames,
            filled_from=dict(self.filled_from),
            lag_s=self.lag_s,
            last_seen_ns=self._last_ns,
            notes=tuple(notes),
        )

    def explain_silence(self, seconds: float) -> str:
        """Explain what to check when no state came for `seconds`."""
        symptom = "it publishes, but its replay socket does not answer" if self.engine else "no message arrived"
        return (
            f"{self.events}: {symptom} for {seconds:.0f} s. Is the engine running, with its event stream at that"
            f" address (--events {self.events})? A frozen process looks the same: check with ps -o stat= -p PID. vLLM's"
            f" KV events come only while requests run: http://HOST:8000{SOURCES_PATH} has their address"
        )

    def receive(self, timeout_s: float = POLL_WAIT_S) -> list[Received]:
        """Return the batches that arrive within `timeout_s`, in order and without gaps. Raise NewerVersion if all that
        arrived is of a newer major version.
        """
        out: list[Received] = []
        self._ask_if_missing()
        ready = self._sockets.poll(timeout_s)
        if self._dealer in ready:
            self._take_answer(out)
        if self._sub in ready:
            self._take_published(out)
        self._ask_if_missing()
        now = self._clock.monotonic_ns()
        if out and self.in_step and not self._more:
            self._behind = False
        if self._is_listening(now, timeout_s) and not self._behind and now - self._observed_ns >= OBSERVE_NS:
            self._observed_ns = now
            out.append(self._added(Kind.OBSERVED, [self._clock.time_ns()]))
            if now - self._received_ns >= SILENT_NS and (stack := read_dump(stack_file(self.events))) != self._stack:
                self._stack = stack
                if stack is not None:
                    out.append(self._added(Kind.STACK, [0, -1, 0, stack[0]], {STACK_TEXT: stack[1]}))
        if self._newer is not None and not out:
            raise self._newer
        return out

    def _is_listening(self, now: int, timeout_s: float) -> bool:
        """Whether silence would be the engine's: it was received here before, and this process was not paused, nor the
        machine suspended, within LISTEN_NS.
        """
        wall_ns = self._clock.time_ns()
        turn_ns = max(now - self._turned_ns, wall_ns - self._turned_at_ns)
        if turn_ns > timeout_s * 1e9 + PAUSED_NS:
            self._listening_ns = now
        self._turned_ns, self._turned_at_ns = now, wall_ns
        return bool(self.engine) and now - self._listening_ns >= LISTEN_NS

    # ---------------------------------------------------------------- what is published

    def _take_published(self, out: list[Received]) -> None:
        for _ in range(10_000):  # then let others have a turn
            try:
                parts = self._sub.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            received = self._decoded(parts[-1])
            if received is not None:
                self._last_ns = received.frame.wall_ns
                self._stack = None
                self.lag_s = (self._clock.time_ns() - received.frame.wall_ns) / 1e9
                self._place(received, out)
            elif is_kv_batch(parts):
                self.has_kv_events = True

    def _decoded(self, payload: bytes) -> Received | None:
        try:
            frame = decode(payload)
        except NewerVersion as error:
            self._newer = error
            return None
        except ContractError:
            self.bad_frames += 1
            return None
        if frame is None:
            return None
        self._newer = None
        self.engine = self.engine or frame.engine
        return Received(frame, payload)

    def _place(self, received: Received, out: list[Received]) -> None:
        """Release a frame if it is the next one, or else keep it until its predecessors have come."""
        frame = received.frame
        now = self._clock.monotonic_ns()
        if frame.epoch < self._epoch and not (now - self._received_ns >= TAKEOVER_NS and is_alive(frame)):
            return
        if frame.epoch != self._epoch:
            self._begin(frame)
        self._received_ns = now
        if isinstance(frame, Keyframe):
            if self._next < 0 or frame.sequence == self._next - 1:
                self._splice(received, out)
            return
        if self._next < 0 and frame.sequence == 0:
            self._next = 0
        if frame.sequence == self._next and not self._is_held:
            self._put_out(received, out)
            if self._waiting:
                self._release(out)
        elif frame.sequence >= self._next:
            if len(self._waiting) >= limits.BATCHES_BEHIND_GAP:
                self._waiting.popleft()
            self._waiting.append(received)

    def _begin(self, first: Frame) -> None:
        """Begin another epoch of the engine, or the first one received."""
        # One with an earlier clock takes over late, when its ledger has passed its first batches over.
        self._follows_epoch = 0 < self._epoch < first.epoch
        is_early = not self._epoch and first.sequence < EARLY_BATCHES
        self._epoch, self._next = first.epoch, self._known(first.engine, first.epoch)
        self._lacks_state = self._is_held = False
        self._keyframe = None
        if self._next < 0:
            unkept = self._unkept(first.engine, first.epoch)
            if unkept > 0:
                self._next, self._lacks_state = unkept, True
            self._follows_epoch = self._follows_epoch or unkept == 0
        if self._next < 0 and (self._follows_epoch or is_early):
            self._next = 0  # the engine has them still, as a rule
        self._behind = self._next > 0
        self._waiting.clear()

    def _splice(self, keyframe: Received, out: list[Received]) -> None:
        out.append(keyframe)
        self._lacks_state = self._is_held = False
        self._keyframe = None
        self._next = max(self._next, keyframe.frame.sequence + 1)
        self._release(out)

    def _release(self, out: list[Received]) -> None:
        """Put out what was kept, as far as it goes without a gap."""
        while self._waiting and self._waiting[0].frame.sequence <= self._next:
            received = self._waiting.popleft()
            if received.frame.sequence == self._next:
                self._put_out(received, out)

    def _put_out(self, received: Received, out: list[Received]) -> None:
        """Put out the next batch, and behind it the keyframe that is due there."""
        self._next += 1
        out.append(received)
        if self._keyframe is not None and received.frame.sequence == self._keyframe.frame.sequence:
            out.append(self._keyframe)
            self._keyframe, self._lacks_state = None, False

    # ---------------------------------------------------------------- what is asked for

    def _ask_if_missing(self) -> None:
        """Ask for what is missing: at once when it is first seen to be, then at intervals."""
        due = self._asked_for != self._next or self._clock.monotonic_ns() - self._asked_ns >= ASK_AGAIN_NS
        if not self.in_step and due:
            self._ask()

    def _ask(self) -> None:
        self._asked_ns, self._asked_for = self._clock.monotonic_ns(), self._next
        if self._lacks_state and not self._waiting and not self._more and self._keyframe is None:
            self._is_held = True
        self._ahead = list(self._waiting)
        by_keyframe = self._next < 0 or self._unreadable or self._is_held
        question: ReplayQuestion = AskKeyframe() if by_keyframe else AskSince(self._epoch, self._next)
        with contextlib.suppress(zmq.Again):
            self._dealer.send(encode_question(question), zmq.NOBLOCK)

    def _take_answer(self, out: list[Received]) -> None:
        parts = self._dealer.recv_multipart()
        try:
            header = msgspec.msgpack.decode(parts[0], type=Replay)
        except (msgspec.DecodeError, IndexError):
            self.bad_frames += 1
            return
        bad = self.bad_frames
        frames = [received for payload in parts[1:] if (received := self._decoded(payload)) is not None]
        self._unreadable = self._unreadable or self.bad_frames > bad
        for received in frames:
            if isinstance(received.frame, Keyframe):
                self._take_keyframe(received, header.asked, out)
            else:
                before = len(out)
                self._place(received, out)
                if header.source != "keyframe":  # that comes with the batches since it was made
                    self.filled_from[header.source] = self.filled_from.get(header.source, 0) + len(out) - before
        self._more = header.more
        if header.more:
            self._ask()
        elif header.asked == "since" and header.source != "keyframe" and header.epoch == self._epoch:
            self._refuse_impossible(header.last)

    def _refuse_impossible(self, last: int) -> None:
        """Leave out batches that the engine never made: they were here when it was asked, and `last` is its latest."""
        impossible = {id(each) for each in self._ahead if each.frame.sequence > last}
        if impossible:
            kept = [each for each in self._waiting if id(each) not in impossible]
            self.bad_frames += len(self._waiting) - len(kept)
            self._waiting = deque(kept)

    def _take_keyframe(self, received: Received, asked: str, out: list[Received]) -> None:
        """Take a keyframe, as an answer to "where are we", or in place of batches that are gone."""
        keyframe = received.frame
        if keyframe.epoch < self._epoch:
            return
        if keyframe.epoch > self._epoch:
            self._begin(keyframe)
        if self._is_held and keyframe.sequence >= self._next - 1:
            self._is_held = False
            if keyframe.sequence == self._next - 1:
                out.append(received)
                self._lacks_state = False
            else:
                self._keyframe = received
            self._release(out)
            return
        if 0 <= self._next <= keyframe.sequence:
            if asked != "since" and not self._unreadable:
                return  # the batches were quicker than the keyframe, and are on their way
            if self._next or self._follows_epoch:  # else nothing before our own beginning is missed
                out.append(self._added(Kind.LOST, [self._next, keyframe.sequence, Stage.TRANSPORT]))
        if self._next <= keyframe.sequence:
            self._next = -1
            self._unreadable = False
            self._splice(received, out)

    def _added(self, kind: Kind, args: list[int], texts: dict[int, str] | None = None) -> Received:
        batch = batch_of(
            self.engine,
            self._epoch,
            [Run(kind, 0, -1, args, [])],
            wall_ns=self._clock.time_ns(),
            mono_ns=self._clock.monotonic_ns(),
            texts=texts,
        )
        payload = encode(batch)
        return Received(cast(Batch, decode(payload)), payload)


class DetectedStream(Source):
    """An event stream at an endpoint: kvscope's own, or vLLM's KV events. The first message shows which.

    Raises ContractError for what is not an endpoint.
    """

    def __init__(self, endpoint: str, options: SourceOptions) -> None:
        self._endpoint = endpoint
        self.has_events = True  # until a message shows otherwise
        self._stream: LiveStream | KvEventSource = LiveStream(endpoint, known=options.known, unkept=options.unkept)

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what has come within the time. Raises NewerVersion."""
        records = self._stream.poll(timeout_s)
        if isinstance(self._stream, LiveStream) and self._stream.has_kv_events:
            self._stream.close()
            self.has_events = self.sends_when_idle = False
            self._stream = KvEventSource(self._endpoint, lambda: [kv_endpoint_at(self._endpoint)])
            self._stream.open()
        return records

    def payload_of(self, frame: Frame) -> bytes:
        """Return the bytes of a frame from the latest poll."""
        return self._stream.payload_of(frame)

    def status(self) -> SourceStatus:
        """Report how the stream is."""
        return self._stream.status()

    def explain_silence(self, seconds: float) -> str:
        """Explain what to check when nothing came for `seconds`."""
        return self._stream.explain_silence(seconds)

    def close(self) -> None:
        """Disconnect."""
        self._stream.close()
