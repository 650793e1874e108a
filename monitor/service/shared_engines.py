"""The sources that several services could read: this one reads those whose lease it holds.

Flags, the configuration file and discovery add a source here as they would to the SourceSet. The bus calls `begin` and
`end` as leases come and go.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvscope.monitor.errors import BadTarget, KvscopeError
from kvscope.monitor.events import limits
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.service.source_set import SourceSet, WantedSource

if TYPE_CHECKING:
    from kvscope.monitor.bus.open_findings import LeftBehind

logger = logging.getLogger(__name__)

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
        """Return the first batch of an engine's epoch that the agent before this one did not receive, or -1 if that is
        unknown.
        """
        with self._lock:
            left = self._left.pop(engine, None)
        return left.sequence + 1 if left is not None and left.epoch == epoch else -1

    def targets(self) -> list[str]:
        """Return what could be read here."""
        with self._lock:
            return [wanted.target for wanted in self._wanted]

    def begin(self, target: str, expected: Mapping[str, LeftBehind]) -> None:
        """Read a target from now on: its lease is held. `expected`: where another agent left each of its engines."""
        for engine, left in expected.items():
            self._watch.expect(engine, left.findings, time.time_ns())
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
