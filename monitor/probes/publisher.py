"""The drain thread: takes what the engine logged, packs it, keeps it, sends it, and serves replays.

It publishes on a PUB socket, `[engine id, frame]` a message, and answers on a ROUTER socket. A question there is a
msgpack array, and the answer a header (Replay, as a msgpack map) with frames after it:

    ["keyframe"]                 the state of the last second: `source` keyframe, one frame
    ["since", epoch, sequence]   batches from that one on: `source` ring or journal, or keyframe if neither has them
                                 any more; `more` if asking again from `last` + 1 brings more

kvscope.monitor.probes.replay_server bounds what clients can ask. A slow subscriber has at most SUBSCRIBER_MESSAGES
waiting, shared by all slow subscribers.

The engine's thread never waits for any of this (law 6).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import zmq

from ..base import limits
from ..contract import journal
from ..contract.event_log import EventLog
from ..contract.wire import Batch, ContractError, Keyframe, decode, encode
from .packer import Packer, Vitals
from .replay_server import Replay, ReplayAnswer, ReplayServer
from .stall_capture import StallCapture

logger = logging.getLogger(__name__)

EVENTS_ENDPOINT: Final = "tcp://127.0.0.1:5757"
REPLAY_ENDPOINT: Final = "tcp://127.0.0.1:5758"
ENGINE_RING_BYTES: Final = 64 << 20


class NotPrivate(ContractError):
    """An endpoint that other machines could reach was asked for."""


class Publisher:
    """Publishes `log` as engine `engine` until closed.

    events, replay: where to bind, tcp on loopback or ipc (a port of `*` picks a free one (see `events_endpoint`)).
    journal_dir: keep a journal there, of at most `journal_bytes`. ring_bytes: of batches, kept in memory for replay.
    interval_s: how often the log is drained. heartbeat_s, keyframe_s: how often each is sent. replay_keyframe_s: how
    often a keyframe is made for the replay socket, at most. before_drain: called in the drain thread before each drain.

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
        ring_bytes: int = ENGINE_RING_BYTES,
        interval_s: float = 0.05,
        heartbeat_s: float = 1.0,
        keyframe_s: float = 60.0,
        replay_keyframe_s: float = limits.KEYFRAME_INTERVAL_NS / 1e9,
        stacks: StallCapture | None = None,
        before_drain: Callable[[], None] | None = None,
    ) -> None:
        for endpoint in (events, replay):
            require_private(endpoint)
        self.packer = Packer(log, engine, vitals)
        self._stacks = stacks
        self._before_drain = before_drain
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
            self._pub = self._bind(events)
            self._replay = ReplayServer(
                self._context, replay, self._since, self._now, log.clock.monotonic_ns, round(replay_keyframe_s * 1e9)
            )
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.events_endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.endpoint
        self._thread = threading.Thread(target=self._run, name="kvscope-drain", daemon=True)

    def start(self) -> None:
        """Begin to drain."""
        self._thread.start()

    def close(self) -> None:
        """Send what is left and stop."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        if self._stacks is not None:
            self._stacks.close()
        self._context.destroy(linger=200)
        if self.journal is not None:
            self.journal.close()

    def _bind(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUB)
        # Only before a peer connects: libzmq 4.3 sends a later change to peers that are going too, and crashes.
        socket.setsockopt(zmq.SNDHWM, limits.SUBSCRIBER_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.REQUEST_BYTES)
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
                self._wait()
                if self._before_drain is not None:
                    self._before_drain()
                self._drain()
                now = clock.monotonic_ns()
                if now >= next_heartbeat:
                    next_heartbeat = now + round(self.heartbeat_s * 1e9)
                    self._send(self.packer.heartbeat())
                    if self._stacks is not None:
                        self._stacks.check(self.packer.vitals, self.events_endpoint)
                if now >= next_keyframe:
                    next_keyframe = now + round(self.keyframe_s * 1e9)
                    self._send(self.packer.keyframe())
            except BaseException:  # a problem of the observer never reaches the engine, and never ends its stream
                logger.exception("the event stream goes on after an error in its drain thread")
                self._closing.wait(1.0)
        self._drain()

    def _wait(self) -> None:
        """Let the interval pass. A question is answered within that interval, so more frequent ones cause no more
        wake-ups.
        """
        began = time.monotonic()
        if self._replay.serve(self.interval_s):
            self._closing.wait(max(0.0, began + self.interval_s - time.monotonic()))

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
        # Before it is sent: every batch that a reader received is in the journal of an engine that is killed.
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

    def _now(self) -> ReplayAnswer:
        self._drain()
        keyframe = self.packer.keyframe()
        header = Replay("keyframe", "keyframe", keyframe.sequence, keyframe.sequence, False, self.packer.epoch)
        return ReplayAnswer(header, [encode(keyframe)])

    def _since(self, epoch: int, sequence: int) -> ReplayAnswer | None:
        if epoch == self.packer.epoch:
            if sequence >= self.packer.next_sequence:
                return ReplayAnswer(Replay("since", "ring", sequence, self.packer.next_sequence - 1, False, epoch), [])
            if self._ring and self._ring[0][0] <= sequence:
                behind = sequence - self._ring[0][0]  # sequences in the ring follow one another
                return self._batches("ring", epoch, islice(self._ring, behind, None))
        if self.journal is not None:
            return self._batches("journal", epoch, self._from_journal(epoch, sequence))
        return None

    def _from_journal(self, epoch: int, sequence: int) -> Iterator[tuple[int, bytes]]:
        """Batches from `sequence` on without a gap."""
        assert self.journal is not None
        for payload in journal.read_since(self.journal.directory, epoch, sequence):
            frame = decode(payload)
            if not isinstance(frame, Batch) or frame.sequence < sequence:
                continue
            if frame.sequence != sequence:
                return
            yield sequence, payload
            sequence += 1

    def _batches(self, source: str, epoch: int, found: Iterable[tuple[int, bytes]]) -> ReplayAnswer | None:
        """Return as many of them as one answer may have, or None if there are none."""
        frames: list[bytes] = []
        first = last = -1
        size = 0
        for sequence, payload in found:
            if size > limits.REPLY_BYTES:
                return ReplayAnswer(Replay("since", source, first, last, True, epoch), frames)
            first, last = first if frames else sequence, sequence
            frames.append(payload)
            size += len(payload)
        more = epoch == self.packer.epoch and last < self.packer.next_sequence - 1
        return ReplayAnswer(Replay("since", source, first, last, more, epoch), frames) if frames else None


def replay_endpoint_for(events: str) -> str:
    """Return where the replay socket is by default: the next port, another free one, or the same path with
    `-replay`.
    """
    head, colon, port = events.rpartition(":")
    if port == "*":
        return events
    if events.startswith("tcp://") and colon and port.isdecimal():
        return f"{head}:{int(port) + 1}"
    return f"{events}-replay" if events.startswith("ipc://") else REPLAY_ENDPOINT


def require_private(endpoint: str) -> None:
    """Raise NotPrivate unless only this machine can reach the endpoint (law 9)."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return
    if parts.scheme != "tcp":
        raise NotPrivate(f"{endpoint} is not an endpoint for events: use tcp://127.0.0.1:PORT or ipc://PATH")
    host = parts.netloc.rsplit(":", 1)[0].strip("[]")
    if host not in ("localhost", "::1") and not host.startswith("127."):
        raise NotPrivate(
            f"{endpoint} could be reached from other machines, and the event stream is neither encrypted nor"
            " authenticated: bind tcp://127.0.0.1:PORT, or ipc://PATH on a volume shared with the monitor"
        )
