"""The pool: its balance now, in words and numbers, and over the recent past, as stacked bands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web.palette import SHADES
from dashboards.web.words import clock
from monitor.query import counted, percent
from monitor.views import EngineView, PointView

SECONDS = 600.0
MOMENTS = 300

CONFIG: Any = {"displayModeBar": False, "responsive": True, "scrollZoom": False}
"""Of the chart, and the same for every engine."""


def legend(engine: EngineView) -> list[Any]:
    """Every state that a block can be in, with its count: together the whole pool."""
    balance = engine.balance
    if balance is None:
        return [html.Li("The balance needs the event stream: this engine is known by its figures alone.")]
    items = []
    for shade in SHADES:
        blocks = getattr(balance, shade.field)
        items.append(
            html.Li(
                [
                    html.Span(className="swatch", style={"backgroundColor": shade.css}),
                    html.Span(shade.label, className="what"),
                    html.Span(f"{blocks:,}", className="count"),
                    html.Span(percent(blocks / balance.total if balance.total else 0.0), className="share"),
                ],
                title=shade.meaning,
                className="bad" if shade.field == "unaccounted" and blocks else "none" if not blocks else "",
            )
        )
    items.append(
        html.Li(
            [
                html.Span(className="swatch"),
                html.Span("total", className="what"),
                html.Span(f"{balance.total:,}", className="count"),
                html.Span("adds up" if balance.holds else "DOES NOT ADD UP", className="share"),
            ],
            className="total" if balance.holds else "total bad",
        )
    )
    if balance.unexplained_references:
        text = f"{counted(balance.unexplained_references, 'reference')} that nobody can explain"
        items.append(html.Li(text, className="bad wide"))
    return items


def bands(engine: str, points: Sequence[PointView]) -> dict[str, Any]:
    """The chart: blocks by state over time, stacked to the pool's total."""
    at = [point.at_ns // 1_000_000 for point in points]
    traces = []
    for shade in SHADES:
        blocks = [getattr(point, shade.field) for point in points]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": shade.label,
                "x": at,
                "y": blocks,
                "stackgroup": "pool",
                "line": {"width": 0, "shape": "hv"},
                "fillcolor": shade.css,
                "hovertemplate": "%{y:,}" if any(blocks) else None,
                "hoverinfo": "skip" if not any(blocks) else "all",
            }
        )
    total = max((sum(getattr(point, shade.field) for shade in SHADES) for point in points[-1:]), default=1)
    axis = {"showline": False, "zeroline": False, "fixedrange": True, "ticks": "", "automargin": True}
    return {
        "data": traces,
        "layout": {
            "uirevision": engine,
            "height": 260,
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "inherit", "size": 12},
            "showlegend": False,
            "hovermode": "x unified",
            "hoverlabel": {"namelength": -1},
            "xaxis": axis
            | {
                "type": "date",
                "showgrid": False,
                "tickformat": "%H:%M:%S",
                "hoverformat": "%H:%M:%S UTC",
                "nticks": 5,
                "tickangle": 0,
            },
            "yaxis": axis
            | {"range": [0, total], "tickformat": ",d", "nticks": 5, "gridcolor": "rgba(128,140,160,0.2)"},
        },
    }


def in_words(engine: EngineView, points: Sequence[PointView]) -> str:
    """What the chart shows, for who cannot see it."""
    if not points or engine.balance is None:
        return "No balance has been heard yet."
    now = ", ".join(
        f"{getattr(engine.balance, shade.field):,} {shade.label}"
        for shade in SHADES
        if getattr(engine.balance, shade.field)
    )
    return f"Blocks by state from {clock(points[0].at)} to {clock(points[-1].at)} UTC. Now: {now}."
