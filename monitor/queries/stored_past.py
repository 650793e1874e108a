"""A server's data about an engine from before memory and history, queried when a window reaches that far."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from kvscope.monitor.errors import NotKnown
from kvscope.monitor.events.samples import Sample

ReadStored = Callable[[str, int, int], list[Sample]]
"""Engine, from, to (wall ns): its samples in order. Raises NotKnown where the server does not answer."""

MOST_BACK_NS: Final = 366 * 86_400 * 10**9
"""No window begins earlier than this before its end: no server keeps more by default."""
WINDOW_PARTS: Final = 600
"""A window is queried in whole parts of it, so that one that moves on with time causes few queries."""
LEAST_PART_NS: Final = 60 * 10**9
KEPT_WINDOWS: Final = 16


def _none_stored(_engine: str, _since_ns: int, _until_ns: int) -> list[Sample]:
    return []


class StoredPast:
    """Samples by window, the last ones kept: what is past does not change. Thread-safe."""

    def __init__(self, read: ReadStored = _none_stored) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int, int], list[Sample]] = OrderedDict()

    def samples(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return the samples from one time until before another (wall ns). Raises NotKnown."""
        if self._read is _none_stored or since_ns >= until_ns:
            return []
        since_ns = max(since_ns, until_ns - MOST_BACK_NS)
        part_ns = max((until_ns - since_ns) // WINDOW_PARTS, LEAST_PART_NS)
        whole = engine, since_ns // part_ns * part_ns, -(-until_ns // part_ns) * part_ns
        with self._lock:
            found = self._kept.get(whole)
        if found is None:
            found = self._read(*whole)
            with self._lock:
                self._kept[whole] = found
                while len(self._kept) > KEPT_WINDOWS:
                    self._kept.popitem(last=False)
        return [one for one in found if since_ns <= (one.at_ns or 0) < until_ns]

    def first_ns(self, engine: str, known_ns: int) -> int:
        """Return when what the server keeps begins (wall), or `known_ns` if it has nothing earlier or is down.

        The moments of the longest window are most of a day apart, so that the part before the first of them is asked
        for again.
        """
        first_ns = known_ns
        for back_ns in (MOST_BACK_NS, 2 * MOST_BACK_NS // WINDOW_PARTS):
            try:
                before = self.samples(engine, first_ns - back_ns, first_ns) if first_ns else []
            except NotKnown:
                break
            first_ns = before[0].at_ns or first_ns if before else first_ns
        return first_ns
