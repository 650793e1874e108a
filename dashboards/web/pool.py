"""The pool of an engine and its queues: as traces of a chart, as one bar, and as a legend that adds up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, in_words, percent
from kvscope.monitor.questions.schema import EngineView, PointView

from . import ui
from .charts import ChartRow, Trace, over_time
from .links import PageWindow
from .palette import OTHER, PALETTE_SHADES, REASONS, css

RUNNING_TRACE: Final = (58, 130, 220)
IN_USE: Final = (104, 168, 235)
FIRST_TOKEN: Final = (58, 145, 134)
QUEUE_TIME: Final = (226, 140, 60)
POOL_SIZE: Final = (112, 118, 130)
AVAILABLE: Final = frozenset({"free", "cached_idle", "reserved"})
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
        traces = [*block_traces(points), Trace("in use", POOL_SIZE, [_in_use(point) for point in points], "line")]
        if len(set(totals)) > 1:  # restarted with another size
            traces.append(Trace("the pool", POOL_SIZE, totals, "line", title="its size then"))
        return ChartRow("Blocks", height_px, traces, max(totals, default=0))
    used = [None if point.usage is None else 100 * point.usage for point in points]
    title = "blocks of requests, from the engine's metrics: the event stream shows the owners"
    return ChartRow("Pool", height_px, [Trace("in use", IN_USE, used, title=title)], 100, " %")


def _in_use(point: PointView) -> int | None:
    """Return how many blocks requests cannot have now, the reserved ones left out."""
    if point.free is None:
        return None
    return sum(getattr(point, shade.field) or 0 for shade in PALETTE_SHADES if shade.field not in AVAILABLE)


def gaps_between(points: Sequence[PointView], until_ns: int) -> list[tuple[int, int]]:
    """Return the times without data, from a point to the next or to the end of the window: the engine, or its reader,
    was down.
    """
    moments = [point.at_ns for point in points]
    usual_ns = median(after - before for before, after in pairwise(moments)) if len(moments) > 1 else 0
    least_ns = max(LEAST_GAP_NS, GAP_TIMES * usual_ns)
    return [(before, after) for before, after in pairwise([*moments, until_ns]) if after - before > least_ns]


def points_over_time(
    name: str, points: Sequence[PointView], rows: Sequence[ChartRow], window: PageWindow, **more: Any
) -> html.Div:
    """Return the chart of these points, with their gaps. `more`: as `over_time` takes it."""
    moments = [point.at_ns for point in points]
    return over_time(name, moments, rows, window, gaps=gaps_between(points, window.until_ns), **more)


def pool_text(point: PointView) -> str:
    """Return the pool at a point in words: its blocks by holder, or its usage."""
    if point.free is None:
        return "in use: not exposed" if point.usage is None else f"in use: {percent(point.usage)} of the pool"
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


NOT_IN_USE: Final = ((128, 140, 160), 0.22)


def balance_legend(engine: EngineView) -> list[Any]:
    """Every state that a block can be in, with its count: together the whole pool."""
    balance = engine.balance
    if balance is None:
        return _usage_legend(engine)
    items = []
    for shade in PALETTE_SHADES:
        blocks = getattr(balance, shade.field)
        share = None if shade.field == "reserved" else balance.share(blocks)
        kind = "bad" if shade.field == "unaccounted" and blocks else "none" if not blocks else ""
        figures = (f"{blocks:,}", "count"), ("" if share is None else percent(share), "share")
        items.append(ui.legend_item(shade.css, shade.label, *figures, title=shade.meaning, className=kind))
    figures = (f"{balance.total:,}", "count"), ("adds up" if balance.holds else "DOES NOT ADD UP", "share")
    items.append(ui.legend_item(None, "total", *figures, className="total" if balance.holds else "total bad"))
    if balance.unexplained_references:
        text = f"{counted(balance.unexplained_references, 'reference')} without a known owner"
        items.append(html.Li(text, className="bad wide"))
    return items


def balance_bar(engine: EngineView) -> html.Div | str:
    """Return the pool as one bar, as wide as its share for each state."""
    balance = engine.balance
    if balance is None:
        return _usage_bar(engine)
    if not balance.total:
        return ""
    there = [(shade, blocks) for shade in PALETTE_SHADES if (blocks := getattr(balance, shade.field))]
    return html.Div(
        [
            html.Span(
                style={"backgroundColor": shade.css, "flexGrow": str(blocks)},
                title=f"{blocks:,} {shade.label}: {shade.meaning}",
            )
            for shade, blocks in there
        ],
        className="pool-bar",
        role="img",
        **ui.aria(label=", ".join(f"{blocks:,} {shade.label}" for shade, blocks in there)),
    )


def _usage_bar(engine: EngineView) -> html.Div | str:
    """Return the pool of an engine whose holders are not known: in use, and the rest."""
    if engine.usage is None:
        return ""
    used = round(1000 * engine.usage)
    return html.Div(
        [
            html.Span(style={"backgroundColor": colour, "flexGrow": str(part)}, title=words)
            for part, colour, words in (
                (used, css(IN_USE), f"{percent(engine.usage)} in use"),
                (1000 - used, css(*NOT_IN_USE), f"{percent(1 - engine.usage)} free, or cached and idle"),
            )
            if part > 0
        ],
        className="pool-bar",
        role="img",
        **ui.aria(label=f"{percent(engine.usage)} of the pool in use"),
    )


def _usage_legend(engine: EngineView) -> list[Any]:
    """Return the two rows for an engine that reports only how much of its pool is in use."""
    if engine.usage is None:
        return [html.Li("Usage of the pool is not exposed.")]
    rows = (
        ("in use", css(IN_USE), engine.usage, "of requests: the event stream shows the owners"),
        ("free, or cached and idle", css(*NOT_IN_USE), 1 - engine.usage, "ready to be allocated"),
    )
    return [
        ui.legend_item(colour, label, (percent(share), "share"), title=meaning)
        for label, colour, share, meaning in rows
    ]
