"""The waiting queue: first come first served, or by priority.

Both have the same few methods. `put_back` is for those that were out of it for a while: preempted, or parked.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from kvscope.engine.requests.request import Request


class WaitingQueue(Protocol):
    """Requests that wait to run."""

    def put(self, request: Request) -> None:
        """At its place behind the others."""
        ...

    def put_back(self, request: Request) -> None:
        """One that was taken before, at the place that it had."""
        ...

    def put_front(self, request: Request) -> None:
        """One that was taken before, ahead of all others that the queue's order allows."""
        ...

    def head(self) -> Request:
        """Return the request whose turn it is. The queue must not be empty."""
        ...

    def take(self) -> Request:
        """Remove and return the head."""
        ...

    def remove(self, request: Request) -> None:
        """Take out one that is in it."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FCFSQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """At the back."""
        self._requests.append(request)

    def put_back(self, request: Request) -> None:
        """Before those that came after it: at the front, but for who is put back out of order."""
        place = next((i for i, other in enumerate(self._requests) if other.number > request.number), len(self))
        self._requests.insert(place, request)

    def put_front(self, request: Request) -> None:
        """At the front."""
        self._requests.appendleft(request)

    def head(self) -> Request:
        """Return the one that has waited longest."""
        return self._requests[0]

    def take(self) -> Request:
        """Remove and return the head."""
        return self._requests.popleft()

    def remove(self, request: Request) -> None:
        """Take out one that is in it."""
        self._requests.remove(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


class PriorityQueue:
    """The lowest priority value first, and among equals the one that arrived first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Request]] = []

    def put(self, request: Request) -> None:
        """At the place its priority gives it, wherever it comes from."""
        heapq.heappush(self._heap, (request.priority, request.arrived_ns, request.number, request))

    put_back = put_front = put

    def head(self) -> Request:
        """Return the most urgent."""
        return self._heap[0][-1]

    def take(self) -> Request:
        """Remove and return the head."""
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: Request) -> None:
        """Take out one that is in it."""
        self._heap = [entry for entry in self._heap if entry[-1] is not request]
        heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in sorted(self._heap, key=lambda entry: entry[:3]))
