"""Events in the lines of a log or the phrases of a report: how often each, and the first and last of them."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvscope.monitor.events.samples import ReportedEvent

KEPT_FIRST: Final = 64
KEPT_LAST: Final = 64


class ReportedEvents:
    """Events of one engine by name. All similar ones are counted, and only the first and the last are kept."""

    def __init__(self) -> None:
        self._first: dict[str, list[ReportedEvent]] = {}
        self._last: dict[str, list[ReportedEvent]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, event: ReportedEvent) -> None:
        """Take one in."""
        self._counts[event.name] += 1
        first = self._first.setdefault(event.name, [])
        if len(first) < KEPT_FIRST:
            first.append(event)
            return
        last = self._last.setdefault(event.name, [])
        last.append(event)
        if len(last) > KEPT_LAST:
            del last[0]

    def __contains__(self, name: str) -> bool:
        return name in self._counts

    def __bool__(self) -> bool:
        return bool(self._counts)

    def count(self, *names: str) -> int:
        """How many there were of these names together."""
        return sum(self._counts[name] for name in names)

    def of(self, *names: str) -> list[ReportedEvent]:
        """Return the kept ones of these names, by name and in their order."""
        return [event for name in names for event in (*self._first.get(name, ()), *self._last.get(name, ()))]

    def names(self) -> list[str]:
        """All names that occurred."""
        return list(self._counts)
