"""The drain thread: takes what the engine logged, packs it, keeps it, sends it, and answers who asks for the past.

It publishes on a PUB socket, `[engine id, frame]` a message, and answers on a ROUTER socket. A request there is a
msgpack array, and the answer a header (Replay, as a msgpack map) with frames after it:

    ["keyframe"]                 the state now: `source` keyframe, one frame
    ["since", epoch, sequence]   batches from that one on: `source` ring or journal, or keyframe if neither has them
                                 any more; `more` if asking again from `last` + 1 brings more

The engine's thread never waits for any of this (law 6).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import zmq

from kvscope.monitor.events import journal
from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.events.wire import Batch, ContractError, Keyframe, decode, encode
from kvscope.monitor.publishing.packer import Packer, Vitals

logger = logging.getLogger(__name__)

EVENTS_ENDPOINT: Final = "tcp://127.0.0.1:5757"
REPLAY_ENDPOINT: Final = "tcp://127.0.0.1:5758"
MAX_REPLY_BYTES: Final = 16 << 20
RING_BYTES: Final = 64 << 20


class Replay(msgspec.Struct):
    """The header of an answer: what it answers, where the frames after it came from, and which batches they are."""

    asked: str
    source: str
    first: int
    last: int
    more: bool
    epoch: int


class NotPrivate(ContractError):
    """An endpoint that other machines could reach was asked for."""


class Publisher:
    """Publishes `log` as engine `engine` until closed.

    events, replay: where to bind, tcp on loopback or ipc; a port of `*` picks a free one (see `events_endpoint`).
    journal_dir: keep a journal there, of at most `journal_bytes`. ring_bytes: of batches, kept in memory for replay.
    interval_s: how often the log is drained. heartbeat_s, keyframe_s: how often each is sent.

    Raises NotPrivate for an address beyond this machine and zmq.ZMQError if one cannot be bound.
    """

    def __init__(
        self,
        log: EventLog,
        engine: str,
        vitals: Callable[[], Vitals],
        *,
        events: str = EVENTS_ENDPOINT,
        replay: str = REPLAY_ENDPOINT,
        journal_dir: Path | None = None,
        journal_bytes: int = 1 << 30,
        ring_bytes: int = RING_BYTES,
        interval_s: float = 0.05,
        heartbeat_s: float = 1.0,
        keyframe_s: float = 60.0,
    ) -> None:
        for endpoint in (events, replay):
            require_private(endpoint)
        self.packer = Packer(log, engine, vitals)
        self.interval_s = interval_s
        self.heartbeat_s = heartbeat_s
        self.keyframe_s = keyframe_s
        self.journal: journal.JournalWriter | None = None
        if journal_dir is not None:
            self.journal = journal.JournalWriter(
                journal_dir, self.packer.epoch, self._keyframe, keep_bytes=journal_bytes, clock=log.clock
            )
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_size = 0
        self._ring_bytes = ring_bytes
        self._closing = threading.Event()
        self._context = zmq.Context()
        try:
            self._pub = self._bind(zmq.PUB, events)
            self._router = self._bind(zmq.ROUTER, replay)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.events_endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="kvscope-drain", daemon=True)

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left and stop."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=200)
        if self.journal is not None:
            self.journal.close()

    def _bind(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise zmq.ZMQError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from error
        return socket

    # ---------------------------------------------------------------- the drain thread

    def _run(self) -> None:
        clock = self.packer.log.clock
        next_heartbeat = 0
        next_keyframe = clock.monotonic_ns() + round(self.keyframe_s * 1e9)
        while not self._closing.is_set():
            try:
                if self._router.poll(round(self.interval_s * 1000)):
                    self._answer()
                self._drain()
                now = clock.monotonic_ns()
                if now >= next_heartbeat:
                    next_heartbeat = now + round(self.heartbeat_s * 1e9)
                    self._send(self.packer.heartbeat())
                if now >= next_keyframe:
                    next_keyframe = now + round(self.keyframe_s * 1e9)
                    self._send(self.packer.keyframe())
            except Exception:  # the observer's trouble is never the engine's
                logger.exception("the event stream goes on after an error in its drain thread")
                self._closing.wait(1.0)
        self._drain()

    def _drain(self) -> None:
        for batch in self.packer.pack():
            self._send(batch)

    def _send(self, frame: Batch | Keyframe) -> None:
        payload = encode(frame)
        if isinstance(frame, Batch):
            self._ring.append((frame.sequence, payload))
            self._ring_size += len(payload)
            while self._ring_size > self._ring_bytes and len(self._ring) > 1:
                self._ring_size -= len(self._ring.popleft()[1])
        # Before it is sent: what a reader has heard is in the journal of an engine that is killed.
        if self.journal is not None:
            try:
                self.journal.append(payload, frame.sequence)
            except OSError as error:
                logger.warning("the journal in %s is off from here on: %s", self.journal.directory, error)
                self.journal = None
        self._pub.send_multipart([frame.engine.encode(), payload])

    def _keyframe(self) -> bytes:
        return encode(self.packer.keyframe())

    # ---------------------------------------------------------------- the replay socket

    def _answer(self) -> None:
        identity, *parts = self._router.recv_multipart()
        try:
            header, frames = self.answer(msgspec.msgpack.decode(parts[-1]) if parts else None)
        except msgspec.DecodeError:
            return  # not one of ours
        with contextlib.suppress(zmq.ZMQError):  # whoever asked has gone
            self._router.send_multipart([identity, msgspec.msgpack.encode(header), *frames])

    def answer(self, request: Any) -> tuple[Replay, list[bytes]]:
        """What the replay socket says to a request; one that it does not understand gets a keyframe."""
        match request:
            case ["since", int(epoch), int(sequence)]:
                return self._since(epoch, sequence)
            case _:
                self._drain()
                return self._now("keyframe")

    def _now(self, asked: str) -> tuple[Replay, list[bytes]]:
        keyframe = self.packer.keyframe()
        header = Replay(asked, "keyframe", keyframe.sequence, keyframe.sequence, False, self.packer.epoch)
        return header, [encode(keyframe)]

    def _since(self, epoch: int, sequence: int) -> tuple[Replay, list[bytes]]:
        if epoch == self.packer.epoch:
            if sequence >= self.packer.next_sequence:
                return Replay("since", "ring", sequence, self.packer.next_sequence - 1, False, epoch), []
            if self._ring and self._ring[0][0] <= sequence:
                found = [(number, payload) for number, payload in self._ring if number >= sequence]
                return self._reply("ring", epoch, found)
        if self.journal is not None:
            found = self._from_journal(epoch, sequence)
            if found:
                return self._reply("journal", epoch, found)
        return self._now("since")

    def _from_journal(self, epoch: int, sequence: int) -> list[tuple[int, bytes]]:
        """Batches from `sequence` on without a gap, as far as one reply goes."""
        assert self.journal is not None
        found: list[tuple[int, bytes]] = []
        size = 0
        for payload in journal.read_since(self.journal.directory, epoch, sequence):
            frame = decode(payload)
            if not isinstance(frame, Batch) or frame.sequence < sequence:
                continue
            if frame.sequence != sequence + len(found) or size > MAX_REPLY_BYTES:
                break
            found.append((frame.sequence, payload))
            size += len(payload)
        return found

    def _reply(self, source: str, epoch: int, found: list[tuple[int, bytes]]) -> tuple[Replay, list[bytes]]:
        size = kept = 0
        while kept < len(found) and size <= MAX_REPLY_BYTES:
            size += len(found[kept][1])
            kept += 1
        last = found[kept - 1][0]
        more = kept < len(found) or (epoch == self.packer.epoch and last < self.packer.next_sequence - 1)
        return Replay("since", source, found[0][0], last, more, epoch), [payload for _, payload in found[:kept]]


def replay_endpoint_for(events: str) -> str:
    """Where the replay socket is unless told: the next port, another free one, or the same path with `-replay`."""
    head, colon, port = events.rpartition(":")
    if port == "*":
        return events
    if events.startswith("tcp://") and colon and port.isdecimal():
        return f"{head}:{int(port) + 1}"
    return f"{events}-replay" if events.startswith("ipc://") else REPLAY_ENDPOINT


def require_private(endpoint: str) -> None:
    """Raises NotPrivate unless only this machine can reach the endpoint (law 9)."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return
    if parts.scheme != "tcp":
        raise NotPrivate(f"{endpoint} is no endpoint for events: use tcp://127.0.0.1:PORT or ipc://PATH")
    host = parts.netloc.rsplit(":", 1)[0].strip("[]")
    if host not in ("localhost", "::1") and not host.startswith("127."):
        raise NotPrivate(
            f"{endpoint} could be reached from other machines, and the event stream is neither encrypted nor"
            " authenticated: bind tcp://127.0.0.1:PORT, or ipc://PATH on a volume shared with the monitor"
        )
