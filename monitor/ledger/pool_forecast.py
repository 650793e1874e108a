"""Blocks that do not return: the floors of an engine that drains to idle, and when such blocks fill the pool.

A floor is what stays in use while the engine is idle. A cache makes none, since blocks without references are not in
use. A leak makes each floor higher than the last.

The forecast has a band for 9 in 10 such engines. Lost blocks are those that no later point has fewer of. They come in
amounts and intervals that vary, so the band has two parts: how well the rate is known from the windows seen, and how
much as many more windows will vary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, NamedTuple

import msgspec

from .ledger_records import Point

MAX_FLOORS: Final = 64


class Floor(NamedTuple):
    """One drain to idle: when it began, and the fewest blocks in use until work came again."""

    at: int
    in_use: float
    where: str = ""
    """The position in the stream of the last event until it was that low, where there is one."""


class IdleFloors:
    """The last MAX_FLOORS floors, folded from samples of an engine. `at` and `in_use` are in the samples' units."""

    def __init__(self) -> None:
        self._floors: deque[Floor] = deque(maxlen=MAX_FLOORS)
        self._idle = False

    def look(self, at: int, *, idle: bool, worked: bool, in_use: float, where: str = "") -> None:
        """Add a sample, with whether the engine has worked since the one before."""
        if idle and (worked or not self._idle):
            self._floors.append(Floor(at, in_use, where))
        elif idle and in_use < self._floors[-1].in_use:
            self._floors[-1] = self._floors[-1]._replace(in_use=in_use, where=where)
        self._idle = idle

    def look_at(self, point: Point, before: Point | None) -> None:
        """Add a point of a stream, in blocks that no living request holds."""
        worked = before is not None and point.finished_requests != before.finished_requests
        in_use = point.balance.finished + point.balance.unaccounted
        idle = not (point.running or point.waiting)
        self.look(point.at_ns, idle=idle, worked=worked, in_use=in_use, where=str(point.position))

    @property
    def seen(self) -> list[Floor]:
        """All floors, oldest first."""
        return list(self._floors)

    def rising(self) -> list[Floor]:
        """Return the floors that each exceed the one before, since a floor last was lower than its predecessor."""
        risen: list[Floor] = []
        for floor in self._floors:
            if risen and floor.in_use < risen[-1].in_use:
                risen = []
            if not risen or floor.in_use > risen[-1].in_use:
                risen.append(floor)
        return risen

    def clear(self) -> None:
        """Forget the floors: the engine has restarted."""
        self._floors.clear()
        self._idle = False


FEWEST_LOSSES: Final = 4
"""With fewer, the intervals between them do not show how much these vary."""
MANY_LOSSES: Final = 10
LEAST_GROWTH_S: Final = 300.0
"""With fewer losses than these, they must span so long: what a burst of load takes in minutes is no trend."""
LONGEST_GAP: Final = 4.0
"""Times the mean interval between losses: one in 50 random intervals is as long, so a longer one is the end of them."""
SOONEST_S: Final = 60.0
"""A pool that is full sooner is full now, for whoever reads it: nobody acts within a minute."""
MOST_WINDOWS: Final = 16
MOST_POINTS: Final = 600
"""Bound on points of the recent past: more would not change a forecast."""
UNSETTLED_SHARE: Final = 0.1
"""A share of the time seen: blocks taken this recently may still be returned."""
GAUSS_95: Final = 1.645
WIDEST: Final = 4.0
"""A band from a quarter of the estimate to four times of it is of no use: the losses came in a burst, and a late one is
no rate.
"""
SMALL_SAMPLE: Final = 1.1
"""Student's quantile over the Gaussian one, times the degrees of freedom."""


class PoolForecast(msgspec.Struct, frozen=True):
    """Seconds from now until the pool is full, with the band in which the moment lies for 9 in 10 such engines, and the
    blocks that are lost for each second.
    """

    full_in_s: float
    earliest_s: float
    latest_s: float
    blocks_per_s: float


def forecast_full(times_s: Sequence[float], held: Sequence[int], room: int) -> PoolForecast | None:
    """Return when blocks that do not return fill `room`, or None where they are too few, have stopped, fill it within a
    minute or between two points, or come so unevenly that the moment is uncertain by a factor of more than `WIDEST`.

    times_s, held: how many blocks were held without a living request, in the order of time. The last point is now.
    """
    lost = list(accumulate(reversed(held), min))[::-1]
    first = next((index for index, (before, after) in enumerate(pairwise(lost), start=1) if after > before), 0)
    if not first or max(held[:first]) >= lost[-1]:
        return None  # as many were held before, and were freed
    began_s, now_s = times_s[first], times_s[-1]
    settled_s = now_s - UNSETTLED_SHARE * (now_s - began_s)
    seen = [(at_s, blocks) for at_s, blocks in zip(times_s[first:], lost[first:], strict=True) if at_s <= settled_s]
    losses = sum(after > before for (_, before), (_, after) in pairwise(seen))
    if losses < FEWEST_LOSSES or (losses < MANY_LOSSES and now_s - began_s < LEAST_GROWTH_S):
        return None
    last_s = next(times_s[at] for at in range(len(lost) - 1, 0, -1) if lost[at] > lost[at - 1])
    if now_s - last_s > LONGEST_GAP * (last_s - began_s) / losses:
        return None  # it has stopped
    count = min(losses, MOST_WINDOWS)
    taken = _by_window(seen, began_s, settled_s, count)
    mean = sum(taken) / count
    spread = math.sqrt(sum((one - mean) ** 2 for one in taken) / (count - 1)) / mean
    left = max(room - seen[-1][1], 0)
    windows = max(left / mean, 1.0)
    relative = spread * math.sqrt(1 / count + 1 / windows)
    factor = math.exp(GAUSS_95 * (1 + SMALL_SAMPLE / (count - 1)) * relative)
    if factor > WIDEST:
        return None
    rate = sum(taken) / (settled_s - began_s)
    takes_s, since_s = left / rate, now_s - settled_s
    full, earliest, latest = (max(one - since_s, 0.0) for one in (takes_s, takes_s / factor, takes_s * factor))
    if full < max(SOONEST_S, now_s - times_s[-2]):
        return None
    return PoolForecast(round(full, 1), round(earliest, 1), round(latest, 1), round(rate, 6))


def forecast_from_usage(times_s: Sequence[float], usage: Sequence[float], blocks: int) -> PoolForecast | None:
    """Return the same from the share of the pool that is in use, where no source reports who holds it.

    times_s, usage: in the order of time, the last is now. blocks: those of the pool that requests can get. Blocks below
    which usage never fell again are held. A full pool has no room left for what living requests usually have in
    addition.
    """
    bucket = -(-len(usage) // MOST_POINTS) or 1
    used = [round(share * blocks) for share in usage]
    floor = list(accumulate(reversed(used), min))[::-1]
    live = median([now - held for now, held in zip(used, floor, strict=True)]) if used else 0
    lowest = [
        min(range(start, min(start + bucket, len(used))), key=used.__getitem__) for start in range(0, len(used), bucket)
    ]
    if len(lowest) < 2:
        return None
    return forecast_full([times_s[at] for at in lowest], [used[at] for at in lowest], round(blocks - live))


def _by_window(seen: Sequence[tuple[float, int]], began_s: float, until_s: float, count: int) -> list[int]:
    """Return the blocks lost in each of `count` windows of equal length."""
    taken = [0] * count
    for (_, before), (at_s, after) in pairwise(seen):
        if after > before:
            taken[min(int((at_s - began_s) / (until_s - began_s) * count), count - 1)] += after - before
    return taken
