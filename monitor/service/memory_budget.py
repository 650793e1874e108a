"""Keeps `monitor serve` within a memory budget: less of the recent past in memory, the more engines report.

Two parts of it can be given up: the ring of recent batches and the points of the timeline, of each engine. The other
data of a ledger has bounds of its own, grows for about an hour, and is set aside first. Each engine gets an equal share
of the rest. Where the default does not fit, points become sparser first and then fewer, and the ring becomes shorter.
The history in the data directory keeps all of it. Nothing that detectors decide on is given up.

When the process comes near the budget, engines keep less than that share, by as much as the process takes too much,
but always a fifth of it: memory that grows beyond that is not the ledgers' to free. Reductions are undone when there is
room for everything that this restores.
"""

from __future__ import annotations

import gc
import logging
import math
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..base import limits
from ..ledger.engine_ledger import MAX_POINTS, MAX_RECENT_BYTES, POINT_EVERY_NS, SPARSE_POINT_EVERY_NS, EngineLedger
from ..ledger.ledger_records import thinned_points
from ..questions.pipeline import Pipeline
from .allocators import trim_heaps

logger = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 1.0
SETTLE_S: Final = 30.0
"""Between two reductions: the operating system gets memory back late, and what is freed is first used again."""
USABLE_SHARE: Final = 0.8
"""Share of the budget to plan with. The rest is for queries, alerts and pages."""
REDUCE_AT_SHARE: Final = 0.9
"""Share of the budget beyond which the recent past shrinks, to REDUCTION of what is kept or less."""
REDUCTION: Final = 0.8
MIN_KEPT_SHARE: Final = 0.2
"""Share of the planned memory that an engine always keeps. With half of it, 25 engines still reached a budget of 768
MiB after 40 minutes.
"""
RESTORE_AT_SHARE: Final = 0.85
"""Share of the budget below which a reduction may be undone. A reduction is undone only if the process stays below this
with full rings and timelines.
"""
RESTORE_AFTER_S: Final = 60.0
"""So long there must have been that room, and no change."""
RING_SHARE: Final = 0.75
"""Share of the reducible memory for the ring. Points have the rest."""
FULL_SHARE_BYTES: Final = round(MAX_RECENT_BYTES / RING_SHARE)
"""An engine needs no more than this."""
POINT_BYTES: Final = 900
LEDGER_BYTES: Final = 9 << 20
"""Bound of a ledger's other records when they are full: ended requests, computed prompts, evictions, histograms.
Measured in a service of 25 engines, with what the allocators lose.
"""
UNREAD_BYTES: Final = limits.UNREAD_MESSAGES * 12 << 10
"""What waits unread for a reader that is behind. libzmq receives each batch into a buffer of 8 KiB, and 9 to 11.5 KB
were resident for one of 700 to 9,000 bytes.
"""
BLOCK_BYTES: Final = 200
"""Size of one block of the pool in a ledger's columns."""
RELEASE_EVERY_S: Final = 60.0
"""Where nothing more can be given up: to collect garbage stops all threads for as long as it takes."""
MIN_RING_BYTES: Final = 1 << 20
MIN_POINTS: Final = 600
"""Ten minutes at the sparsest, for rates and trends."""
MIN_ROOM_BYTES: Final = 64 << 20
"""Beyond what the service takes without engines."""


class MemoryBudgetView(msgspec.Struct, kw_only=True, frozen=True):
    """The memory budget of the service, what it bounds for each engine, and what was given up for it.

    budget_bytes   0 without a budget. recent_bytes: of batches in memory. point_every_s, max_points: of the timeline.
    kept_share     of what the plan gives each engine. reductions, restorations: how often it was lowered and raised.
    exceeded       the process is near the budget or beyond, and nothing more is given up.
    """

    budget_bytes: int = 0
    resident_bytes: int = 0
    engines: int = 0
    recent_bytes: int = 0
    point_every_s: float = 0.0
    max_points: int = 0
    given_up: list[str] = []
    kept_share: float = 1.0
    reductions: int = 0
    restorations: int = 0
    exceeded: bool = False


class LedgerBounds(NamedTuple):
    """Bounds of the recent past in each ledger."""

    ring_bytes: int = MAX_RECENT_BYTES
    point_every_ns: int = POINT_EVERY_NS
    max_points: int = MAX_POINTS


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
        self._kept_share = 1.0
        """Share of the plan that each engine keeps now."""
        self._reductions = self._restorations = 0
        self._checked_s = self._changed_s = self._released_s = 0.0
        self._room_since_s = math.inf
        self._pools: dict[str, int] = {}
        """By engine, the blocks of its pool."""
        self._bounds = LedgerBounds()

    def check(self) -> None:
        """Bound engines that are new, give up more if the process takes too much, and restore it if there is room."""
        now_s = time.monotonic()
        if now_s - self._checked_s < CHECK_EVERY_S:
            return
        self._checked_s = now_s
        resident = self._resident()
        if not self._has_room(resident):
            self._room_since_s = math.inf
        elif self._room_since_s == math.inf:
            self._room_since_s = now_s
        if self._exceeds(resident):
            if now_s - self._changed_s >= SETTLE_S:
                self._reduce(now_s, resident)
        elif now_s - max(self._room_since_s, self._changed_s) >= RESTORE_AFTER_S:
            self._restore(now_s)
        elif self._pools_now() != self._pools:
            self._apply()

    def view(self) -> MemoryBudgetView:
        """Return the bounds in force, and what was given up for them."""
        resident = self._resident()
        return MemoryBudgetView(
            budget_bytes=self.budget,
            resident_bytes=resident,
            engines=len(self._pools),
            recent_bytes=self._bounds.ring_bytes,
            point_every_s=self._bounds.point_every_ns / 1e9,
            max_points=self._bounds.max_points,
            given_up=self._given_up(),
            kept_share=self._kept_share,
            reductions=self._reductions,
            restorations=self._restorations,
            exceeded=self._exceeds(resident) and self._kept_share <= MIN_KEPT_SHARE,
        )

    def _exceeds(self, resident: int) -> bool:
        return resident > REDUCE_AT_SHARE * self.budget

    def _has_room(self, resident: int) -> bool:
        """Whether one reduction can be undone: the process stays small when rings and timelines are full again."""
        if self._kept_share >= 1.0:
            return False
        bounds = self._planned(self._restored_share())
        regrowth = sum(
            max(0, bounds.ring_bytes - ledger.recent_bytes)
            + POINT_BYTES * max(0, bounds.max_points - len(ledger.points))
            for ledger in self._ledgers()
        )
        return resident + regrowth <= RESTORE_AT_SHARE * self.budget

    def _ledgers(self) -> list[EngineLedger]:
        return list(self._pipeline.fleet.engines.values())

    def _restored_share(self) -> float:
        return min(1.0, self._kept_share / REDUCTION)

    def _reduced_share(self, resident: int) -> float:
        """Return the share to keep so that the process is below REDUCE_AT_SHARE again, if the recent past can give up
        so much. Rings that are not full yet give up what they have, not what they may have.
        """
        bounds = self._planned(1.0)
        planned = len(self._ledgers()) * (bounds.ring_bytes + POINT_BYTES * bounds.max_points)
        used = sum(ledger.recent_bytes + POINT_BYTES * len(ledger.points) for ledger in self._ledgers())
        excess = resident - REDUCE_AT_SHARE * self.budget
        return max(MIN_KEPT_SHARE, min(self._kept_share * REDUCTION, (used - excess) / max(1, planned)))

    def _reduce(self, now_s: float, resident: int) -> None:
        lower = self._reduced_share(resident)
        if lower < self._kept_share:
            self._kept_share, self._changed_s = lower, now_s
            self._reductions += 1
            self._apply()
        elif now_s - self._released_s < RELEASE_EVERY_S:
            return
        else:
            logger.warning(
                "memory budget of %d MiB: the process takes %d MiB, and nothing more is given up",
                self.budget >> 20,
                resident >> 20,
            )
        self._released_s = now_s
        release_memory()

    def _restore(self, now_s: float) -> None:
        self._kept_share, self._changed_s = self._restored_share(), now_s
        self._room_since_s = math.inf
        self._restorations += 1
        self._apply()

    def _pools_now(self) -> dict[str, int]:
        return {ledger.engine: ledger.state.total for ledger in self._ledgers()}

    def _apply(self) -> None:
        """Bound all ledgers, and log bounds that are new."""
        before = self._bounds
        with self._pipeline.locked():
            self._pools = self._pools_now()
            self._bounds = self._planned(self._kept_share)
            for ledger in self._pipeline.fleet.engines.values():
                bound_ledger(ledger, self._bounds)
        if self._bounds != before:
            given_up = "; ".join(self._given_up()) or "nothing is given up"
            kept = round(100 * self._kept_share)
            logger.warning("memory budget of %d MiB, %d %% of the plan: %s", self.budget >> 20, kept, given_up)

    def _planned(self, kept_share: float) -> LedgerBounds:
        """Return the bounds of each ledger when it keeps `kept_share` of its equal share of the budget."""
        engines = max(1, len(self._pools))
        kept = (LEDGER_BYTES + UNREAD_BYTES) * engines + BLOCK_BYTES * sum(self._pools.values())
        fair = max(0.0, USABLE_SHARE * self.budget - self._base - kept) / engines
        share = min(fair, FULL_SHARE_BYTES) * kept_share
        points = min(MAX_POINTS, max(MIN_POINTS, round((1 - RING_SHARE) * share / POINT_BYTES)))
        interval_ns = MAX_POINTS * POINT_EVERY_NS // points
        return LedgerBounds(
            ring_bytes=min(MAX_RECENT_BYTES, max(MIN_RING_BYTES, round(RING_SHARE * share))),
            point_every_ns=min(SPARSE_POINT_EVERY_NS, interval_ns),
            max_points=points,
        )

    def _given_up(self) -> list[str]:
        given_up = []
        ring_bytes, point_every_ns, max_points = self._bounds
        if ring_bytes < MAX_RECENT_BYTES:
            given_up.append(
                f"{ring_bytes / 2**20:.1f} MiB of recent events for each engine in memory instead of"
                f" {MAX_RECENT_BYTES >> 20} MiB"
            )
        if point_every_ns > POINT_EVERY_NS:
            given_up.append(
                f"a point of the timeline every {point_every_ns / 1e9:.1f} s instead of {POINT_EVERY_NS / 1e9} s"
            )
        kept_s = max_points * point_every_ns / 1e9
        if kept_s < 0.99 * MAX_POINTS * POINT_EVERY_NS / 1e9:
            given_up.append(f"{kept_s / 60:.0f} minutes of the timeline in memory instead of 60")
        return given_up


def bound_ledger(ledger: EngineLedger, bounds: LedgerBounds) -> None:
    """Let a ledger keep no more of the recent past than `bounds`.

    Batches and points beyond new bounds are dropped, points evenly where the interval grew.
    """
    ledger.max_recent_bytes = bounds.ring_bytes
    ledger.drop_oldest_batches()
    if bounds[1:] != (ledger.point_every_ns, ledger.points.maxlen):
        ledger.point_every_ns = bounds.point_every_ns
        ledger.points = deque(thinned_points(ledger.points, bounds.point_every_ns), bounds.max_points)


def resident_bytes() -> int:
    """Return the resident memory of this process, or its maximum so far where /proc is missing."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def release_memory() -> None:
    """Free what is in cycles, and return freed memory to the operating system."""
    gc.collect()
    trim_heaps()
