"""Reports of vLLM's API server processes to the engine's process, and the engine's end of them.

Each API server has a PUSH socket, the engine one PULL socket. Messages are msgpack arrays of at most REQUEST_BYTES.
Both ends are on one machine and share its monotonic clock. The inbox joins the reports with the scheduler's requests by
vLLM's request id. The drain thread reads it just before it packs what the engine logged, so that RECEIVED stands before
ARRIVED. Only the engine's thread calls `number_of`, once for each request, and it never waits: both threads agree on a
number by one atomic operation on a dict.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import socket
import stat
import tempfile
import time
from collections import deque
from enum import IntEnum
from pathlib import Path
from typing import Final

import msgspec
import zmq

from ...base import limits
from ...contract.event_log import EventLog
from ...contract.kinds import Status
from .probe_state import INTERNAL_SUFFIX, ProbeState

INBOX_PREFIX: Final = "kvscope-front-end-"
STALE_S: Final = 60
"""A socket this old accepts connections, if the process that made it is there: it listens at once."""


class FrontEndKind(IntEnum):
    """An event of a request in the front end."""

    RECEIVED = 1
    CLIENT_GONE = 2
    ENDED = 3


class FrontEndMessage(msgspec.Struct, frozen=True, array_like=True):
    """One report. `request_id` is vLLM's own id, which the scheduler has too. `at_ns` is monotonic."""

    kind: FrontEndKind
    request_id: str
    at_ns: int
    prompt_tokens: int = 0


def front_end_endpoint(events: str) -> str:
    """Return where the engine that publishes at `events` takes reports, or an empty string where its port is picked at
    random.
    """
    if events.endswith(":*"):
        return ""
    name = re.sub(r"[^0-9A-Za-z.]+", "-", events.partition("://")[2])
    return f"ipc://{Path(tempfile.gettempdir()) / f'{INBOX_PREFIX}{name}-{os.getuid()}'}"


def remove_stale_inboxes(now_s: float | None = None) -> list[Path]:
    """Remove this user's sockets of engines that were killed, and return them.

    A killed process cannot remove its socket. The operating system refuses connections to it from then on, whatever the
    process id is used for by now. now_s: wall time, for tests.
    """
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{INBOX_PREFIX}*-{os.getuid()}"):
        with contextlib.suppress(OSError):  # another engine removes it too
            found = path.lstat()
            old = (time.time() if now_s is None else now_s) - found.st_mtime > STALE_S
            if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid() and old and _refuses(path):
                path.unlink()
                removed.append(path)
    return removed


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of connections is no refusal
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


LATE_NS: Final = 30_000_000_000
"""A report that took longer is dropped: whether its request arrived is known for twice as long."""
MESSAGES_PER_CHECK: Final = 1_000
MAX_PENDING: Final = 10_000
MAX_ARRIVALS: Final = 65_536


class FrontEndInbox:
    """Takes reports at `endpoint` for the probe with `state`. Raises zmq.ZMQError if it cannot bind there."""

    def __init__(self, state: ProbeState, log: EventLog, endpoint: str) -> None:
        self.dropped = 0
        """Reports that were unreadable, late or too many."""
        self._state = state
        self._log = log
        self._numbers = itertools.count(1)
        self._agreed: dict[str, int] = {}
        """Numbers of requests that were received or have just arrived."""
        self._arrivals: deque[tuple[str, int]] = deque(maxlen=MAX_ARRIVALS)
        """Since the last check."""
        self._arrived: dict[str, tuple[int, int]] = {}
        """When each recent request arrived, and its number, in that order."""
        self._pending: dict[str, int] = {}
        """Requests that were received and have not arrived."""
        remove_stale_inboxes()
        self._decoder = msgspec.msgpack.Decoder(FrontEndMessage)
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.MAXMSGSIZE, limits.REQUEST_BYTES)
        self._pull.setsockopt(zmq.RCVHWM, MESSAGES_PER_CHECK)
        try:
            self._pull.bind(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    @property
    def pending(self) -> int:
        """How many requests were received and have not arrived."""
        return len(self._pending)

    def number_of(self, request_id: str) -> int:
        """Return the number of a request that arrives at the scheduler."""
        number = self._agreed.setdefault(request_id, next(self._numbers))
        self._arrivals.append((request_id, number))
        return number

    def check(self) -> None:
        """Report what the front end did since the last check. From the drain thread."""
        now = self._log.clock.monotonic_ns()
        fresh = self._new_arrivals()
        for _ in range(MESSAGES_PER_CHECK):
            try:
                payload = self._pull.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                self._take(self._decoder.decode(payload), fresh, now)
            except msgspec.DecodeError:
                self.dropped += 1
        for request_id, number in fresh.items():
            self._pending.pop(request_id, None)
            self._agreed.pop(request_id, None)
            self._arrived[request_id] = now, number
        self._forget(now)

    def _new_arrivals(self) -> dict[str, int]:
        return dict(self._arrivals.popleft() for _ in range(len(self._arrivals)))

    def close(self) -> None:
        """Stop. After the drain thread has ended."""
        self._context.destroy(linger=0)

    def _take(self, message: FrontEndMessage, fresh: dict[str, int], now: int) -> None:
        request_id = message.request_id[: limits.REQUEST_ID_CHARS]
        if message.kind == FrontEndKind.RECEIVED:
            self._receive(request_id, message, fresh, now)
            return
        fresh |= self._new_arrivals()  # one that has ended by now may have arrived since this check began
        number = None if request_id in fresh else self._pending.pop(request_id, None)
        if number is not None:  # it never arrived, and is not expected any more
            self._agreed.pop(request_id, None)
            gone = message.kind == FrontEndKind.CLIENT_GONE
            if gone:
                self._log.client_gone(number)
            self._log.ended_before_arrival(number, Status.FINISHED_ABORTED if gone else Status.FINISHED_ERROR)
        elif message.kind == FrontEndKind.CLIENT_GONE:
            number = fresh.get(request_id) or self._arrived.get(request_id, (0, 0))[1]
            if number := number or self._state.numbers.get(request_id, 0):
                self._log.client_gone(number)

    def _receive(self, request_id: str, message: FrontEndMessage, fresh: dict[str, int], now: int) -> None:
        number = fresh.get(request_id)
        if number is None:
            if request_id in self._state.numbers or request_id in self._arrived:
                return  # its arrival was sent before, or a session goes on
            if now - message.at_ns > LATE_NS or len(self._pending) >= MAX_PENDING:
                self.dropped += 1
                return
            number = self._pending[request_id] = self._agreed.setdefault(request_id, next(self._numbers))
        name = INTERNAL_SUFFIX.sub("", request_id)
        taken = self._state.is_taken(name, request_id)
        self._log.received(number, request_id if taken else name, message.prompt_tokens, at_ns=message.at_ns)

    def _forget(self, now: int) -> None:
        while self._arrived:
            first = next(iter(self._arrived))
            if now - self._arrived[first][0] < 2 * LATE_NS and len(self._arrived) <= MAX_ARRIVALS:
                return
            with contextlib.suppress(KeyError):
                del self._arrived[first]
