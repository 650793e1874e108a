"""Requests that wait to be sent, a file each, so that they survive the service. Requests beyond the bound are deleted,
the oldest first.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Final, NamedTuple

SPOOL_BYTES: Final = 256 << 20
_SPOOLED_NAME: Final = re.compile(r"(\d{20})-(\d{20})-(\d{9})\.snappy")


class SpooledRequest(NamedTuple):
    """A request on disk, with so many points. `at_ns` is when it was spooled (wall)."""

    number: int
    at_ns: int
    points: int
    path: Path


class Spool:
    """The spool in `directory`, which is made if missing. One process. Thread-safe. Raises OSError."""

    def __init__(self, directory: Path, max_bytes: int = SPOOL_BYTES) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for half in directory.glob(".*.new"):
            half.unlink()
        self._waiting = sorted(
            SpooledRequest(int(match[1]), int(match[2]), int(match[3]), path)
            for path in directory.iterdir()
            if (match := _SPOOLED_NAME.fullmatch(path.name))
        )
        self._sizes = {each.number: each.path.stat().st_size for each in self._waiting}
        self._next = self._waiting[-1].number + 1 if self._waiting else 0

    def append(self, body: bytes, points: int, at_ns: int) -> int:
        """Keep a request. Return how many points had to go for it, of older requests. Raises OSError."""
        with self._lock:
            path = self._directory / f"{self._next:020d}-{at_ns:020d}-{points:09d}.snappy"
            half = path.with_name(f".{path.name}.new")
            half.write_bytes(body)
            half.replace(path)
            self._waiting.append(SpooledRequest(self._next, at_ns, points, path))
            self._sizes[self._next] = len(body)
            self._next += 1
            dropped = 0
            while sum(self._sizes.values()) > self._max_bytes and len(self._waiting) > 1:
                dropped += self._waiting[0].points
                self._remove(self._waiting[0])
            return dropped

    def oldest(self) -> SpooledRequest | None:
        """Return the request that is to be sent next."""
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def remove(self, request: SpooledRequest) -> None:
        """Forget a request, if the bound has not removed it meanwhile."""
        with self._lock:
            if request.number in self._sizes:
                self._remove(request)

    def bytes(self) -> int:
        """Return the size of what waits."""
        with self._lock:
            return sum(self._sizes.values())

    def _remove(self, request: SpooledRequest) -> None:
        request.path.unlink(missing_ok=True)
        self._waiting.remove(request)
        del self._sizes[request.number]
