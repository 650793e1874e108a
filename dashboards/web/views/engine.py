"""One engine over time: who had the pool, who waited and why, what was computed, and what happened here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web.charts import Row, Trace, over_time
from dashboards.web.markup import aria
from dashboards.web.palette import SHADES
from dashboards.web.view import Here, View
from dashboards.web.words import clock, number
from monitor.query import Query, counted
from monitor.views import EngineView, PointView

MOMENTS = 300


def view(query: Query, here: Here) -> View:
    """Its figures, and the chart."""
    points = query.points(here.name, here.window.seconds, MOMENTS)
    return View(
        {
            "summary": html.Section(_summary(here.engine), id="summary", **aria(label="The engine")),
            "chart": html.Section(_chart(here, points), className="card"),
        }
    )


def _summary(engine: EngineView) -> list[Any]:
    """What it is, and its main figures."""
    about = " · ".join(
        filter(
            None,
            (
                engine.model,
                engine.version,
                f"step {engine.step:,}" if engine.step is not None else "",
                f"restarted {counted(engine.restarts, 'time')}" if engine.restarts else "",
                f"as of {clock(engine.at)} UTC" if engine.at else "",
            ),
        )
    )
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(engine.waiting_by_reason.items()))
    tiles = (
        ("Running", number(engine.running), ""),
        ("Waiting", number(engine.waiting), reasons),
        ("Pool in use", _percent(engine.usage), "cached, idle blocks not counted"),
        ("Output", number(engine.output_tokens_per_s, "tok/s"), ""),
        ("Computed", number(engine.computed_tokens_per_s, "tok/s"), ""),
        ("Preemptions", number(engine.preemptions), ""),
        ("Prefix hits", _percent(engine.prefix_hit_rate), ""),
    )
    return [
        html.H1(engine.engine),
        html.P(about, className="about"),
        html.Dl(
            [html.Div([html.Dt(name), html.Dd(value), html.Dd(note, className="note")]) for name, value, note in tiles],
            className="tiles",
        ),
    ]


def _percent(part: float | None) -> str:
    return "not exposed" if part is None else f"{100 * part:.1f} %"


def _chart(here: Here, points: Sequence[PointView]) -> html.Div:
    bands = [
        Trace(shade.label, shade.rgb, [getattr(point, shade.field) for point in points], opacity=shade.opacity,
              title=shade.meaning)
        for shade in SHADES
    ]  # fmt: skip
    total = sum(getattr(points[-1], shade.field) for shade in SHADES) if points else 1
    return over_time("history", [point.at_ns for point in points], [Row("Blocks", 240, bands, total)], here.window)
