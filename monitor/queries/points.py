"""The pool and the queues over time."""

from __future__ import annotations

from collections.abc import Sequence

from kvscope.monitor.events.kinds import Cause, Limit, name_of
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.schema import PointView
from kvscope.monitor.text import timestamp


def point_views(points: Sequence[Point], most: int) -> list[PointView]:
    """At most `most` of them, evenly thinned, the last among them."""
    stride = max(1, -(-len(points) // most))
    return [_point_view(point) for point in points[(len(points) - 1) % stride :: stride]]


def _point_view(point: Point) -> PointView:
    balance = point.balance
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
    )
