"""Keeps `monitor serve` within a memory budget: less of the recent past in memory, the more engines report.

Two parts of it can be given up: the ring of recent batches and the points of the timeline, of each engine. What else a
ledger keeps is bounded, grows for about an hour, and is set aside first. Each engine gets an equal share of the rest.
Where the default does not fit, points become sparser first and then fewer, and the ring becomes shorter. The history
in the data directory keeps all of it. Nothing that detectors decide on is given up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvscope.monitor.ledger.engine_ledger import (
    MAX_POINTS,
    MAX_RECENT_BYTES,
    POINT_EVERY_NS,
    SPARSE_POINT_EVERY_NS,
    EngineLedger,
)
from kvscope.monitor.ledger.pool_points import thinned_points
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import MemoryBudgetView

logger = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 1.0
SETTLE_S: Final = 5.0
"""Between two reductions: memory is returned to the operating system late."""
USABLE_SHARE: Final = 0.8
"""Of the budget. The rest is for queries, alerts and pages."""
REDUCE_AT_SHARE: Final = 0.9
"""Of the budget. Beyond it, what is kept shrinks by REDUCTION."""
REDUCTION: Final = 0.8
RING_SHARE: Final = 0.75
"""Of what an engine may give up. Points have the rest."""
POINT_BYTES: Final = 900
LEDGER_BYTES: Final = 6 << 20
"""Of a ledger's other records when they are full: ended requests, computed prompts, evictions, histograms."""
BLOCK_BYTES: Final = 200
"""Of each block of the pool in a ledger's columns."""
RELEASE_EVERY_S: Final = 60.0
"""Where nothing more can be given up: to collect garbage stops all threads for as long as it takes."""
MIN_RING_BYTES: Final = 1 << 20
MIN_POINTS: Final = 600
"""Ten minutes at the sparsest, for rates and trends."""
MIN_ROOM_BYTES: Final = 64 << 20
"""Beyond what the service takes without engines."""


class ServiceMemory:
    """Bounds what the ledgers of `pipeline` keep so that the process stays within `budget` bytes. One thread only.

    Raises ValueError if the service itself leaves no room in the budget.
    """

    def __init__(self, pipeline: Pipeline, budget: int, resident: Callable[[], int] | None = None) -> None:
        self._pipeline = pipeline
        self._resident = resident or resident_bytes
        self.budget = budget
        self._base = self._resident()
        if budget * USABLE_SHARE < self._base + MIN_ROOM_BYTES:
            needed = (self._base + MIN_ROOM_BYTES) / USABLE_SHARE
            raise ValueError(
                f"--memory-budget of {budget >> 20} MiB is too small: the service takes {self._base >> 20} MiB without"
                f" engines. Give {needed / 2**20:.0f}M or more"
            )
        self._pressure = 1.0
        self._checked_s = self._reduced_s = self._released_s = 0.0
        self._pools: dict[str, int] = {}
        """By engine, the blocks of its pool."""
        self._ring_bytes, self._point_every_ns, self._max_points = MAX_RECENT_BYTES, POINT_EVERY_NS, MAX_POINTS

    def check(self) -> None:
        """Apply the bounds to engines that are new, and lower them if the process takes too much."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        exceeds = self._resident() > REDUCE_AT_SHARE * self.budget
        if exceeds and now_s - self._reduced_s >= SETTLE_S:
            self._reduced_s = now_s
            self._pressure *= REDUCTION
            if self._apply() or now_s - self._released_s >= RELEASE_EVERY_S:
                self._released_s = now_s
                release_memory()
        elif self._pools_now() != self._pools:
            self._apply()

    def view(self) -> MemoryBudgetView:
        """Return the bounds in force, and what was given up for them."""
        return MemoryBudgetView(
            budget_bytes=self.budget,
            resident_bytes=self._resident(),
            engines=len(self._pools),
            recent_bytes=self._ring_bytes,
            point_every_s=self._point_every_ns / 1e9,
            max_points=self._max_points,
            given_up=self._given_up(),
        )

    def _pools_now(self) -> dict[str, int]:
        return {ledger.engine: ledger.state.total for ledger in list(self._pipeline.fleet.engines.values())}

    def _apply(self) -> bool:
        """Bound all ledgers; whether the bounds have changed."""
        before = self._ring_bytes, self._point_every_ns, self._max_points
        with self._pipeline.locked():
            self._pools = self._pools_now()
            self._plan(max(1, len(self._pools)))
            for ledger in self._pipeline.fleet.engines.values():
                bound_ledger(ledger, self._ring_bytes, self._point_every_ns, self._max_points)
        if (self._ring_bytes, self._point_every_ns, self._max_points) == before:
            return False
        given_up = "; ".join(self._given_up()) or "nothing is given up"
        logger.warning("memory budget of %d MiB: %s", self.budget >> 20, given_up)
        return True

    def _plan(self, engines: int) -> None:
        kept = LEDGER_BYTES * engines + BLOCK_BYTES * sum(self._pools.values())
        share = max(0.0, USABLE_SHARE * self.budget - self._base - kept) / engines * self._pressure
        self._ring_bytes = min(MAX_RECENT_BYTES, max(MIN_RING_BYTES, round(RING_SHARE * share)))
        points = min(MAX_POINTS, max(MIN_POINTS, round((1 - RING_SHARE) * share / POINT_BYTES)))
        interval_ns = MAX_POINTS * POINT_EVERY_NS // points
        self._point_every_ns = min(SPARSE_POINT_EVERY_NS, interval_ns)
        self._max_points = points

    def _given_up(self) -> list[str]:
        given_up = []
        if self._ring_bytes < MAX_RECENT_BYTES:
            given_up.append(
                f"{self._ring_bytes / 2**20:.1f} MiB of recent events for each engine in memory instead of"
                f" {MAX_RECENT_BYTES >> 20} MiB"
            )
        if self._point_every_ns > POINT_EVERY_NS:
            given_up.append(
                f"a point of the timeline every {self._point_every_ns / 1e9:.1f} s instead of {POINT_EVERY_NS / 1e9} s"
            )
        kept_s = self._max_points * self._point_every_ns / 1e9
        if kept_s < 0.99 * MAX_POINTS * POINT_EVERY_NS / 1e9:
            given_up.append(f"{kept_s / 60:.0f} minutes of the timeline in memory instead of 60")
        return given_up


def bound_ledger(ledger: EngineLedger, recent_bytes: int, point_every_ns: int, max_points: int) -> None:
    """Let a ledger keep at most `recent_bytes` of batches and `max_points` points, one each `point_every_ns`.

    Batches and points beyond the new bounds are dropped, points evenly where the interval grew.
    """
    ledger.max_recent_bytes = recent_bytes
    ledger.drop_oldest_batches()
    if (point_every_ns, max_points) != (ledger.point_every_ns, ledger.points.maxlen):
        ledger.point_every_ns = point_every_ns
        ledger.points = deque(thinned_points(ledger.points, point_every_ns), max_points)


def resident_bytes() -> int:
    """Return the resident memory of this process; where there is no /proc, its maximum so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def release_memory() -> None:
    """Return freed memory to the operating system, where the C library can."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
