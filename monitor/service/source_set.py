"""The sources that a service reads: they may be added and removed while it runs.

A source is kept as long as anything wants it: each wish has an origin, such as the command line or a discovery. With
the last wish for it, its reader ends, and the engines that no other source has leave the ledgers: nothing was found by
that, so no finding fires or is resolved. Findings of an engine that is soon watched again go on as they were.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple, Protocol

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events import limits
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SourceChange, SourceView
from kvscope.monitor.service.source_reader import SourceReader
from kvscope.monitor.sources.source import Source
from kvscope.monitor.sources.targets import TargetKind
from kvscope.monitor.text import timestamp

logger = logging.getLogger(__name__)

MAX_CHANGES: Final = 1_000
"""Bound of the list of changes, which keeps the latest."""
LEAVE_WITHIN_S: Final = 2.0
"""Beyond the time for which a source may block. A reader that takes longer hangs, and is left behind."""


class WantedSource(NamedTuple):
    """A target, and how it is read (None: by its form)."""

    target: str
    kind: TargetKind | None = None


class WantedSources(Protocol):
    """Where sources are asked for: a SourceSet, or what decides which of them a SourceSet reads."""

    def add(self, wanted: WantedSource, origin: str) -> None:
        """Read a target from now on. Raises BadTarget, SourceError and ContractError."""

    def remove(self, wanted: Iterable[WantedSource], origin: str) -> None:
        """Withdraw the origin's wish for each."""

    def wanted(self, origin: str) -> list[WantedSource]:
        """Return what an origin wants now."""
        ...


class _Watched(NamedTuple):
    reader: SourceReader
    origins: set[str]


class SourceSet:
    """The readers of a service, by target. Thread-safe. Additions and removals happen one after the other.

    `opened` makes the source of a target, `read` its reader. `left` is called with the engines that left the ledgers.
    """

    def __init__(
        self,
        watch: Pipeline,
        opened: Callable[[WantedSource], Source],
        read: Callable[[Source], SourceReader],
        left: Callable[[list[str]], None] = lambda _engines: None,
    ) -> None:
        self._watch = watch
        self._opened = opened
        self._read = read
        self._left = left
        self._watched: dict[WantedSource, _Watched] = {}
        self._changes: deque[SourceChange] = deque(maxlen=MAX_CHANGES)
        self._counts: Counter[str] = Counter(added=0, removed=0)
        self._changing = threading.RLock()
        """Held while sources are added and removed, which may take as long as a source blocks."""
        self._lock = threading.Lock()
        self._is_running = False

    def __iter__(self) -> Iterator[SourceReader]:
        """Iterate over the readers as they are now."""
        with self._lock:
            return iter([watched.reader for watched in self._watched.values()])

    def start(self) -> None:
        """Begin to read."""
        with self._changing:
            self._is_running = True
            for reader in self:
                reader.start()

    def stop(self) -> None:
        """End all readers, and wait until they have ended."""
        with self._changing:
            self._is_running = False
            for reader in self:
                reader.stop()

    def add(self, wanted: WantedSource, origin: str) -> None:
        """Read a target from now on, or note one more origin if it is read already.

        Raises BadTarget for a target that no source follows, or for too many, and SourceError and ContractError.
        """
        with self._changing:
            known = self._watched.get(wanted)
            if known is not None:
                known.origins.add(origin)
                return
            if len(self._watched) >= limits.SOURCES:
                raise BadTarget(
                    f"{wanted.target}: the service reads {limits.SOURCES} sources already, and no more than that: give"
                    " the rest to another `monitor serve` or `monitor agent`"
                )
            self.add_reader(self._read(self._opened(wanted)), wanted, origin)

    def add_reader(self, reader: SourceReader, wanted: WantedSource, origin: str) -> None:
        """Read with a reader that is made already."""
        with self._changing:
            with self._lock:
                self._watched[wanted] = _Watched(reader, {origin})
            if self._is_running:
                self._note("added", reader.target, origin, [])
                reader.start()

    def remove(self, wanted: Iterable[WantedSource], origin: str) -> None:
        """Withdraw the origin's wish for each. On return, targets without an origin are no longer read."""
        with self._changing:
            leaving = []
            for one in wanted:
                watched = self._watched.get(one)
                if watched is not None:
                    watched.origins.discard(origin)
                    if not watched.origins:
                        leaving.append(watched.reader)
                        with self._lock:
                            del self._watched[one]
            for reader in leaving:
                reader.ask_to_stop()
            for reader in leaving:
                self._leave(reader, origin)

    def _leave(self, reader: SourceReader, origin: str) -> None:
        if not reader.leave(LEAVE_WITHIN_S):
            logger.warning("the reader of %s hangs and is left behind", reader.target)
        remaining = {engine for other in self for engine in other.engines()}
        engines = [engine for engine in reader.engines() if engine not in remaining]
        self._left(engines)
        for engine in engines:
            self._watch.remove(engine)
        for worker in reader.workers:
            self._watch.report_recovery(worker)
        self._watch.supervisor.forget({reader.target, *engines}, reader.workers)
        self._note("removed", reader.target, origin, engines)

    def wanted(self, origin: str) -> list[WantedSource]:
        """Return what an origin wants now."""
        with self._changing:
            return [one for one, watched in self._watched.items() if origin in watched.origins]

    def engines(self, wanted: WantedSource) -> tuple[str, ...]:
        """Return the engines that a source brought, or none if it is not read."""
        with self._lock:
            watched = self._watched.get(wanted)
        return watched.reader.engines() if watched is not None else ()

    def views(self) -> list[SourceView]:
        """Report how each source is."""
        return [reader.view() for reader in self]

    def changes(self) -> list[SourceChange]:
        """Return what was added and removed while the service ran, the latest first."""
        with self._lock:
            return list(reversed(self._changes))

    def counts(self) -> dict[str, int]:
        """Return how many sources were added and removed while the service ran."""
        with self._lock:
            return dict(self._counts)

    def _note(self, change: str, target: str, origin: str, engines: list[str]) -> None:
        with self._lock:
            self._counts[change] += 1
            at = timestamp(time.time_ns()) or ""
            self._changes.append(SourceChange(at, change, target, origin, engines))
        names = f", with {', '.join(engines)}" if engines else ""
        level = logging.WARNING if engines else logging.INFO
        logger.log(level, "the source %s was %s by %s%s", target, change, origin, names)
