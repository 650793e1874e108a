"""The sources that a service reads: they may be added and removed while it runs.

A source is kept as long as anything wants it: each wish has an origin, such as the command line or a discovery. With
the last wish for it, its reader ends, and the engines that no other source has leave the ledgers: nothing was found by
that, so no finding fires or is resolved. Findings of an engine that is soon watched again go on as they were.

Sources beyond what the process's file descriptors and threads allow are refused: they are shown with the reason, and
read when others leave.

Where agents share their engines, a source is added to SharedEngines instead, which reads those whose lease this agent
holds. The bus calls `begin` and `end` as leases come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from ..base import limits
from ..base.errors import BadTarget, KvscopeError
from ..base.http_url import shown
from ..base.process_limits import sources_that_fit, why_no_more_sources
from ..base.text import timestamp
from ..questions.pipeline import Pipeline
from ..questions.schema import SourceChange, SourceView
from ..sources.source import READ_ERRORS, Source
from ..sources.targets import TargetKind
from .source_reader import SourceReader

if TYPE_CHECKING:
    from ..fleet.open_findings import LeftBehind

logger = logging.getLogger(__name__)

MAX_CHANGES: Final = 1_000
"""Bound of the list of changes, which keeps the latest."""
LEAVE_WITHIN_S: Final = 2.0
"""Beyond the time for which a source may block. A reader that takes longer hangs, and is left behind."""


REFUSED_SOURCES: Final = "sources beyond the limit"
"""The worker under whose name refused sources are reported."""
NO_THREAD: Final = (
    "the system gives the process no further thread: raise TasksMax in its systemd unit, `ulimit -u`, or the limit of"
    " processes of its container"
)


class WantedSource(NamedTuple):
    """A target, and how it is read (None: by its form)."""

    target: str
    kind: TargetKind | None = None


class _Watched(NamedTuple):
    reader: SourceReader
    origins: set[str]


class _Refused(NamedTuple):
    why: str
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
        self._refused: dict[WantedSource, _Refused] = {}
        """Sources that do not fit, in the order in which they are read when others leave."""
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
            for wanted in list(self._watched):
                self._begin(wanted)

    def stop(self) -> None:
        """End all readers, and wait until they have ended."""
        with self._changing:
            self._is_running = False
            for reader in self:
                reader.thread.ask_to_stop()
            for reader in self:
                reader.stop()

    def add(self, wanted: WantedSource, origin: str) -> None:
        """Read a target from now on, or when it fits. Note one more origin if it is read already.

        Raises BadTarget for a target that no source follows, SourceError and ContractError.
        """
        with self._changing:
            known = self._watched.get(wanted) or self._refused.get(wanted)
            if known is not None:
                known.origins.add(origin)
            elif len(self._watched) >= sources_that_fit():
                self._refuse(wanted, why_no_more_sources(), {origin})
            else:
                self.add_reader(self._read(self._opened(wanted)), wanted, origin)

    def add_reader(self, reader: SourceReader, wanted: WantedSource, origin: str) -> None:
        """Read with a reader that is made already."""
        with self._changing:
            with self._lock:
                self._watched[wanted] = _Watched(reader, {origin})
            if self._is_running and self._begin(wanted):
                self._note("added", reader.target, origin, [])

    def _begin(self, wanted: WantedSource) -> bool:
        """Start a source's reader. Whether the system gave it a thread."""
        reader, origins = self._watched[wanted]
        try:
            reader.start()
        except RuntimeError:  # can't start new thread
            reader.stop()
            with self._lock:
                del self._watched[wanted]
            self._refuse(wanted, NO_THREAD, origins)
            return False
        return True

    def _refuse(self, wanted: WantedSource, why: str, origins: set[str]) -> None:
        with self._lock:
            self._refused[wanted] = _Refused(why, origins)
        self._watch.report_failure(REFUSED_SOURCES, "discovery", why, (REFUSED_SOURCES,))

    def _admit(self) -> None:
        """Read refused sources, as far as they fit now."""
        for wanted, refused in list(self._refused.items())[: self.room()]:
            with self._lock:
                del self._refused[wanted]
            try:
                for origin in refused.origins:
                    self.add(wanted, origin)
            except READ_ERRORS as error:
                self._refuse(wanted, str(error), refused.origins)
        if not self._refused:
            self._watch.report_recovery(REFUSED_SOURCES)

    def room(self) -> int:
        """Return how many further sources could be read now."""
        return max(0, sources_that_fit() - len(self._watched))

    def refused(self) -> list[WantedSource]:
        """Return the sources that do not fit."""
        with self._lock:
            return list(self._refused)

    def remove(self, wanted: Iterable[WantedSource], origin: str) -> None:
        """Withdraw the origin's wish for each. On return, targets without an origin are no longer read, and refused
        ones that fit in their place are.
        """
        with self._changing:
            leaving = []
            for one in wanted:
                known = self._watched.get(one) or self._refused.get(one)
                if known is not None:
                    known.origins.discard(origin)
                    if not known.origins:
                        with self._lock:
                            watched = self._watched.pop(one, None)
                            self._refused.pop(one, None)
                        leaving += [watched.reader] if watched is not None else []
            for reader in leaving:
                reader.thread.ask_to_stop()
            for reader in leaving:
                self._leave(reader, origin)
            self._admit()

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
            known: dict[WantedSource, _Watched | _Refused] = {**self._watched, **self._refused}
            return [one for one, each in known.items() if origin in each.origins]

    def engines(self, wanted: WantedSource) -> tuple[str, ...]:
        """Return the engines that a source brought, or none if it is not read."""
        with self._lock:
            watched = self._watched.get(wanted)
        return watched.reader.engines() if watched is not None else ()

    def views(self) -> list[SourceView]:
        """Report how each source is, and at the end why each refused one is not read."""
        with self._lock:
            refused = [
                (shown(wanted.target), str(wanted.kind or ""), why) for wanted, (why, _) in self._refused.items()
            ]
        return [
            *(reader.view() for reader in self),
            *(SourceView(target, "", False, 0, {}, why, kind=kind) for target, kind, why in refused),
        ]

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


LEASED: Final = "a lease"
"""The origin of sources that are read because this agent holds their lease."""


class SharedEngines:
    """The sources that this service could read, in front of `readers`, which read those whose lease it holds.
    Thread-safe.
    """

    def __init__(self, watch: Pipeline, readers: SourceSet) -> None:
        self._watch = watch
        self._readers = readers
        self._wanted: dict[WantedSource, set[str]] = {}
        self._read: dict[str, WantedSource] = {}
        """The sources read now, by target. Readers ask for it, and must not wait for a source that is being removed."""
        self._left: dict[str, LeftBehind] = {}
        """Where others left engines that this agent has not received yet."""
        self._lock = threading.Lock()

    def add(self, wanted: WantedSource, origin: str) -> None:
        """Read a target from when this agent holds its lease. Raises BadTarget for too many."""
        with self._lock:
            if wanted not in self._wanted and len(self._wanted) >= limits.BUS_SHARED_ENGINES:
                raise BadTarget(
                    f"{wanted.target}: this agent names {limits.BUS_SHARED_ENGINES} engines to share already, and no"
                    " more than that: name the rest on other agents"
                )
            self._wanted.setdefault(wanted, set()).add(origin)

    def remove(self, wanted: Iterable[WantedSource], origin: str) -> None:
        """Withdraw the origin's wish for each. A lease of one that nothing wants is handed over."""
        with self._lock:
            for one in wanted:
                origins = self._wanted.get(one, set())
                origins.discard(origin)
                if not origins:
                    self._wanted.pop(one, None)

    def wanted(self, origin: str) -> list[WantedSource]:
        """Return what an origin wants now."""
        with self._lock:
            return [wanted for wanted, origins in self._wanted.items() if origin in origins]

    def unkept(self, engine: str, epoch: int) -> int:
        """Return the first batch of an engine's epoch that the agent before this one did not receive, which is 0 of an
        epoch that began since, or -1 if that is unknown.
        """
        with self._lock:
            left = self._left.pop(engine, None)
        if left is None or not 0 < left.epoch <= epoch:
            return -1
        return left.sequence + 1 if left.epoch == epoch else 0

    def targets(self) -> list[str]:
        """Return what could be read here. With as many sources as fit that is what is read: another agent takes the
        rest.
        """
        refused, is_full = self._readers.refused(), not self._readers.room()
        with self._lock:
            could = [wanted for wanted in self._wanted if wanted not in refused]
            return [wanted.target for wanted in could if not is_full or wanted.target in self._read]

    def begin(self, target: str, expected: Mapping[str, LeftBehind]) -> None:
        """Read a target from now on: its lease is held. `expected`: where another agent left each of its engines."""
        for engine, left in expected.items():
            self._watch.expect(engine, left.findings)
            with self._lock:
                self._left[engine] = left
        with self._lock:
            named = (wanted for wanted in self._wanted if wanted.target == target)
            source = self._read[target] = next(named, WantedSource(target))
        try:
            self._readers.add(source, LEASED)
        except KvscopeError as error:
            logger.error("this agent holds the lease of %s and cannot read it: %s", target, error)

    def end(self, target: str) -> None:
        """Stop reading a target: its lease is another agent's. No finding fires or is resolved by it."""
        with self._lock:
            leased = self._read.get(target)
        if leased is not None:
            self._readers.remove([leased], LEASED)
        with self._lock:
            self._read.pop(target, None)

    def engines(self, target: str) -> Sequence[str]:
        """Return the engines that were found at a target."""
        with self._lock:
            leased = self._read.get(target)
        return self._readers.engines(leased) if leased is not None else ()
