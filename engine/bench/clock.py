"""Virtual time, which passes only on demand: for the engine, its scheduler and their watchdog."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """A Clock (kvscope.monitor.contract.event_log) that its holder moves: what is scheduled runs as its time passes."""

    def __init__(self) -> None:
        self.ns = 1_000_000_000
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def monotonic_ns(self) -> int:
        """Now."""
        return self.ns

    def time_ns(self) -> int:
        """Now, as a date in November 2023."""
        return 1_700_000_000_000_000_000 + self.ns

    def at(self, ns: int, call: Callable[[], None]) -> None:
        """Have `call` made when it is `ns`. Calls due at one time run in the order of registration."""
        heapq.heappush(self._due, (ns, next(self._numbers), call))

    def every(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        """Have `call` made after so long, and again each time that so long has passed. Return what ends that."""
        interval_ns = round(seconds * 1e9)
        repeats = True

        def again() -> None:
            if repeats:
                call()
                self.at(self.ns + interval_ns, again)

        def stop() -> None:
            nonlocal repeats
            repeats = False

        self.at(self.ns + interval_ns, again)
        return stop

    @property
    def next_due_ns(self) -> int | None:
        """When the next call is due, or None if none is."""
        return self._due[0][0] if self._due else None

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        until = self.ns + round(seconds * 1e9)
        while self.pass_to(until):
            pass

    def pass_to(self, ns: int) -> bool:
        """Let time pass until `ns`, or the first that is due by then: that is done. Whether there was such a one."""
        if not self._due or self._due[0][0] > ns:
            self.ns = max(self.ns, ns)
            return False
        due, _, call = heapq.heappop(self._due)
        self.ns = max(self.ns, due)
        call()
        return True
