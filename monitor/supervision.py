"""The workers of the service and their health: failures that were contained, and heartbeats of loops.

A reader, detector, exporter or page that raises is a worker that failed: the failure is contained to it, logged once,
counted, and reported as a finding, on /metrics and in the API, until the worker works again. A loop that must turn
sends heartbeats. A late one is reported the same way, and fails /healthz if it stays late.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

logger = logging.getLogger(__name__)

WorkerKind = Literal["reader", "detector", "delivery", "history", "copy", "discovery"]
LATE_FACTOR: Final = 3
"""A loop that is late by so many of its intervals fails /healthz: by then it does not come back by itself."""
MAX_ERROR_CHARS: Final = 300


class WorkerFailure(NamedTuple):
    """A worker that does not work. `since_ns` is wall time, `engines` those that depend on it (none named: all)."""

    worker: str
    kind: WorkerKind
    error: str
    since_ns: int
    times: int
    engines: tuple[str, ...] = ()

    def concerns(self, engine: str) -> bool:
        """Whether an engine depends on the worker."""
        return not self.engines or engine in self.engines


class _Loop(NamedTuple):
    within_s: float
    beat_s: float


class Supervisor:
    """The workers of one pipeline. Thread-safe."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._failures: dict[str, WorkerFailure] = {}
        self._totals: dict[str, int] = {}
        self._loops: dict[str, _Loop] = {}

    def failed(self, worker: str, kind: WorkerKind, error: BaseException | str, engines: Sequence[str] = ()) -> bool:
        """Record that a worker failed. Whether that is news: the first failure, or another error."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = text[:MAX_ERROR_CHARS]
        with self._lock:
            before = self._failures.get(worker)
            self._totals[worker] = self._totals.get(worker, 0) + 1
            since_ns = before.since_ns if before is not None else time.time_ns()
            times = before.times + 1 if before is not None else 1
            self._failures[worker] = WorkerFailure(worker, kind, text, since_ns, times, tuple(engines))
        is_news = before is None or before.error != text
        if is_news:
            logger.error("%s failed: %s", worker, text, exc_info=None if isinstance(error, str) else error)
        return is_news

    def works(self, worker: str) -> bool:
        """Record that a worker works. Whether that is news."""
        with self._lock:
            failure = self._failures.pop(worker, None)
        if failure is not None:
            logger.info("%s works again after %d failures", worker, failure.times)
        return failure is not None

    @property
    def has_failures(self) -> bool:
        """Whether any worker does not work."""
        return bool(self._failures)

    def failures(self, engine: str = "") -> tuple[WorkerFailure, ...]:
        """Return the workers that do not work, of those that an engine depends on if one is named."""
        with self._lock:
            return tuple(failure for failure in self._failures.values() if not engine or failure.concerns(engine))

    def totals(self) -> dict[str, int]:
        """Return how often each worker failed since the service began."""
        with self._lock:
            return dict(self._totals)

    def forget(self, names: set[str], workers: Iterable[str]) -> None:
        """Drop the failures that concern only `names`, which are watched no more, and the counts of `workers`."""
        with self._lock:
            for worker, failure in list(self._failures.items()):
                if failure.engines and names.issuperset(failure.engines):
                    del self._failures[worker]
                    self._totals.pop(worker, None)
            for worker in workers:
                self._totals.pop(worker, None)

    # ---------------------------------------------------------------- heartbeats

    def beat(self, worker: str, within_s: float) -> None:
        """Record that a loop turns, and that it should again within so many seconds."""
        with self._lock:
            self._loops[worker] = _Loop(within_s, self._monotonic_s())

    def ended(self, worker: str) -> None:
        """Expect no more heartbeats of a loop."""
        with self._lock:
            self._loops.pop(worker, None)

    def is_late(self, worker: str) -> bool:
        """Return whether a loop has not turned for longer than its interval."""
        with self._lock:
            loop = self._loops.get(worker)
        return loop is not None and self._monotonic_s() - loop.beat_s > loop.within_s

    def late(self, factor: float = 1.0) -> dict[str, float]:
        """Return the loops that are late by `factor` intervals or more, and the seconds since each last turned."""
        now = self._monotonic_s()
        with self._lock:
            ages = {worker: (now - loop.beat_s, loop.within_s) for worker, loop in self._loops.items()}
        return {worker: age_s for worker, (age_s, within_s) in ages.items() if age_s > within_s * factor}
