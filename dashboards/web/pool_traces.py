"""The traces of charts of an engine, wherever they stand: its pool and its queues over time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from kvscope.dashboards.web.charts import ChartRow, Trace
from kvscope.dashboards.web.palette import OTHER, PALETTE_SHADES, REASONS
from kvscope.monitor.reason_words import in_words
from kvscope.monitor.schema import PointView

RUNNING_TRACE: Final = (58, 130, 220)
IN_USE: Final = (104, 168, 235)
FIRST_TOKEN: Final = (58, 145, 134)
QUEUE_TIME: Final = (226, 140, 60)
POOL_SIZE: Final = (112, 118, 130)
LEAST_GAP_NS: Final = 3_500_000_000
"""An engine is silent after that long: its stream has an event each second."""
GAP_TIMES: Final = 4
"""A pause of so many times the usual distance of points is a gap in what is known."""


def pool_row(points: Sequence[PointView], height_px: int) -> ChartRow:
    """Return the pool by holder where holders are known, or else how much of it is in use. The axis ends at the largest
    pool.
    """
    if any(point.free is not None for point in points):
        totals = [sum(getattr(point, shade.field) or 0 for shade in PALETTE_SHADES) for point in points]
        traces = block_traces(points)
        if len(set(totals)) > 1:  # restarted with another size
            traces.append(Trace("the pool", POOL_SIZE, totals, "line", title="its size then"))
        return ChartRow("Blocks", height_px, traces, max(totals, default=0))
    used = [None if point.usage is None else 100 * point.usage for point in points]
    title = "blocks of requests, from the engine's metrics: the event stream shows the owners"
    return ChartRow("Pool", height_px, [Trace("in use", IN_USE, used, title=title)], 100, " %")


def gaps_between(points: Sequence[PointView]) -> list[tuple[int, int]]:
    """Return the times without data, from a point to the next: the engine, or its reader, was down."""
    pairs = [(before, after, after.at_ns - before.at_ns) for before, after in pairwise(points)]
    usual_ns = median(apart for _, _, apart in pairs) if pairs else 0
    return [
        (before.at_ns, after.at_ns) for before, after, apart in pairs if apart > max(LEAST_GAP_NS, GAP_TIMES * usual_ns)
    ]


def pool_text(point: PointView) -> str:
    """Return the pool at a point in words: its blocks by holder, or its usage."""
    if point.free is None:
        return "in use: not exposed" if point.usage is None else f"in use: {100 * point.usage:.1f} % of the pool"
    held = ", ".join(f"{count:,} {shade.label}" for shade in PALETTE_SHADES if (count := getattr(point, shade.field)))
    return f"blocks: {held}"


def queue_text(point: PointView) -> str:
    """How many requests run and wait at a point."""
    known = [(point.requests_running, "running"), (point.requests_waiting, "waiting")]
    return ", ".join(f"{count:,} {word}" for count, word in known if count is not None) or "not exposed"


def latency_traces(points: Sequence[PointView]) -> list[Trace]:
    """How long requests waited for their first token and in the queue."""
    first_tokens, queue_times = ([getattr(point, name) for point in points] for name in ("first_token", "queue_time"))
    return [
        _latency_trace("first token, p95", FIRST_TOKEN, [known and known.p95_s for known in first_tokens]),
        _latency_trace("first token, p50", FIRST_TOKEN, [known and known.p50_s for known in first_tokens], opacity=0.5),
        _latency_trace("queue time, p95", QUEUE_TIME, [known and known.p95_s for known in queue_times]),
    ]


def _latency_trace(
    name: str, rgb: tuple[int, int, int], seconds: Sequence[float | None], opacity: float = 1.0
) -> Trace:
    return Trace(name, rgb, seconds, "line", after=True, opacity=opacity, none="no request")


def block_traces(points: Sequence[PointView]) -> list[Trace]:
    """Return the holders of the pool, in bands."""
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
    """Return the waiting requests by reason, in bands, and how many ran."""
    met = {reason for point in points for reason in point.waiting_by_reason}
    waiting = [
        Trace(
            in_words(reason),
            REASONS.get(reason, OTHER),
            [point.waiting_by_reason.get(reason, 0) for point in points],
            title=f"waiting requests of this reason: {reason}",
        )
        for reason in [*(name for name in REASONS if name in met), *sorted(met - set(REASONS))]
    ]
    if not met:
        waiting = [Trace("waiting", OTHER, [point.requests_waiting for point in points])]
    return [*waiting, Trace("running", RUNNING_TRACE, [point.requests_running for point in points], "line")]
