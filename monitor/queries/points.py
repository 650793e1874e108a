"""The pool and the queues over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from kvscope.monitor.events.kinds import Cause, Limit, name_of
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.schema import PointView
from kvscope.monitor.text import timestamp

ThinnedItem = TypeVar("ThinnedItem")


def point_views(points: Sequence[Point], most: int) -> list[PointView]:
    """Return at most `most` points, evenly thinned, the last among them."""
    kept = evenly_thinned(points, most)
    started = [False, *(_epoch(point) > _epoch(before) > 0 for before, point in pairwise(kept))]
    return [_point_view(point, restarted) for point, restarted in zip(kept, started, strict=False)]


def evenly_thinned(items: Sequence[ThinnedItem], most: int) -> Sequence[ThinnedItem]:
    """Return every n-th item, the last among them, so that they are at most `most`."""
    stride = max(1, -(-len(items) // most))
    return items[(len(items) - 1) % stride :: stride] if items else items


def _epoch(point: Point) -> int:
    return point.position.epoch if point.position is not None else 0


def _point_view(point: Point, restarted: bool) -> PointView:
    balance = point.balance
    usable = balance.total - balance.reserved
    in_use = usable - balance.free - balance.cached_idle
    return PointView(
        at=timestamp(point.at_ns) or "",
        at_ns=point.at_ns,
        free=balance.free,
        cached_idle=balance.cached_idle,
        running=balance.running,
        waiting=balance.waiting,
        finished=balance.finished,
        reserved=balance.reserved,
        unaccounted=balance.unaccounted,
        requests_running=point.running,
        requests_waiting=point.waiting,
        preemptions=point.preemptions,
        output_tokens=point.output_tokens,
        computed_tokens=point.computed_tokens,
        waiting_by_reason={name_of(Cause, cause): count for cause, count in point.waiting_by},
        allocation_failures=point.allocation_failures,
        steps=point.steps,
        limits={name_of(Limit, limit): steps for limit, steps in point.limits},
        unused_tokens=point.unused_tokens if point.unused_tokens >= 0 else None,
        usable=usable,
        usage=in_use / usable if usable > 0 else None,
        epoch=_epoch(point) or None,
        restarted=restarted,
    )
