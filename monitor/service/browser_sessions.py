"""Sessions of browsers: random values that stand for the token for a time."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable

from kvscope.monitor.events import limits


class BrowserSessions:
    """Sessions that end after `seconds`. At most `most` are kept: one more ends the oldest.

    They are kept as hashes, in memory alone: a restart ends all of them.
    """

    def __init__(
        self,
        seconds: int = limits.SESSION_S,
        most: int = limits.SESSIONS,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._most = most
        self._clock_s = clock_s
        self._end_s: dict[bytes, float] = {}

    def begin(self) -> str:
        """Begin a session and return its value."""
        value = secrets.token_urlsafe(32)
        while len(self._end_s) >= self._most:
            del self._end_s[next(iter(self._end_s))]
        self._end_s[_session_key(value)] = self._clock_s() + self.seconds
        return value

    def left_s(self, value: str) -> float:
        """Return the seconds left of the session of that value, or 0 if it has none."""
        key = _session_key(value)
        left_s = self._end_s.get(key, 0.0) - self._clock_s()
        if left_s <= 0:
            self._end_s.pop(key, None)
        return max(0.0, left_s)


def _session_key(value: str) -> bytes:
    """Return a hash, so that a lookup takes no longer for a value that is nearly right."""
    return hashlib.sha256(value.encode("utf-8", "surrogateescape")).digest()
