"""What charts of an engine are drawn from, wherever they stand: its pool and its queues over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvscope.dashboards.web.charts import Trace
from kvscope.dashboards.web.palette import OTHER, PALETTE_SHADES, REASONS
from kvscope.monitor.schema import PointView

RUNNING_TRACE: Final = (58, 130, 220)


def block_traces(points: Sequence[PointView]) -> list[Trace]:
    """Who had the pool, in bands."""
    return [
        Trace(
            shade.label,
            shade.rgb,
            [getattr(point, shade.field) for point in points],
            opacity=shade.opacity,
            title=shade.meaning,
            bad=shade.field == "unaccounted",
        )
        for shade in PALETTE_SHADES
    ]


def request_traces(points: Sequence[PointView]) -> list[Trace]:
    """Who waited and why, in bands, and how many ran."""
    met = {reason for point in points for reason in point.waiting_by_reason}
    waiting = [
        Trace(
            reason,
            REASONS.get(reason, OTHER),
            [point.waiting_by_reason.get(reason, 0) for point in points],
            title="waiting, for this reason",
        )
        for reason in [*(name for name in REASONS if name in met), *sorted(met - set(REASONS))]
    ]
    if not met:
        waiting = [Trace("waiting", OTHER, [point.requests_waiting for point in points])]
    return [*waiting, Trace("running", RUNNING_TRACE, [point.requests_running for point in points], "line")]
