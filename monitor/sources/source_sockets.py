"""The ZeroMQ sockets of sources, all of one context: a context takes two threads and five file descriptors."""

from __future__ import annotations

import os
import threading
from typing import Final, NamedTuple
from weakref import WeakSet

import zmq

SOCKETS: Final = 65_535
"""Sockets of the context, libzmq's own bound. Its default of 1,023 is less than two for each source."""


class _SharedContext(NamedTuple):
    context: zmq.Context[zmq.Socket[bytes]]
    users: WeakSet[SourceSockets]


_contexts_in_use: Final[dict[int, _SharedContext]] = {}
"""By process: the threads of a context do not survive a fork."""
_context_lock: Final = threading.Lock()


class SourceSockets:
    """The sockets of one source. One thread only."""

    def __init__(self) -> None:
        with _context_lock:
            shared = _contexts_in_use.get(os.getpid())
            if shared is None:
                shared = _contexts_in_use[os.getpid()] = _SharedContext(zmq.Context(), WeakSet())
                shared.context.set(zmq.MAX_SOCKETS, SOCKETS)
                shared.context.linger = 0  # a socket that is collected unclosed must not wait for its peer
            shared.users.add(self)
        self._context = shared.context
        self._sockets: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()

    def add(self, kind: int) -> zmq.Socket[bytes]:
        """Make a socket and poll it from now on. Raises ZMQError if the process may open no further file."""
        made = self._context.socket(kind)
        self._sockets.append(made)
        self._poller.register(made, zmq.POLLIN)
        return made

    def poll(self, timeout_s: float) -> dict[zmq.Socket[bytes], int]:
        """Return the sockets that have a message within the time."""
        return dict(self._poller.poll(round(timeout_s * 1000)))

    def close(self) -> None:
        """Disconnect, and end the context if no other source uses it. May be called more than once."""
        for each in self._sockets:
            each.close(linger=0)
        with _context_lock:
            shared = _contexts_in_use.get(os.getpid())
            if shared is not None:
                shared.users.discard(self)
                if not shared.users:
                    del _contexts_in_use[os.getpid()]
                    shared.context.destroy(linger=0)
