"""The engines at a glance: which there are, how the chosen one is, and whether what is said of it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web.links import to_engine
from dashboards.web.markup import aria
from dashboards.web.words import clock, number
from monitor.query import counted, duration
from monitor.views import EngineView


def picker(engines: Sequence[EngineView], chosen: str) -> list[Any]:
    """A link for each engine, with its state and the number of its open findings."""
    return [html.Ul([html.Li(_choice(engine, engine.engine == chosen), key=engine.engine) for engine in engines])]


def _choice(engine: EngineView, is_chosen: bool) -> html.A:
    open_now = sum(count for severity, count in engine.findings.items() if severity != "info")
    parts: list[Any] = [
        html.Span(className=f"status {engine.status}", **aria(hidden="true")),
        html.Span(engine.engine, className="name"),
        html.Span(engine.status, className="how"),
    ]
    if open_now:
        parts.append(html.Span(f"{open_now:,}", className="badge", title=counted(open_now, "open finding")))
    return html.A(parts, href=to_engine(engine.engine), className="engine chosen" if is_chosen else "engine")


def stream_health(engine: EngineView) -> list[Any]:
    """Whether figures are exact, and what was lost."""
    lost = []
    if engine.batches_lost:
        lost.append(f"{engine.batches_lost:,} {'batch' if engine.batches_lost == 1 else 'batches'} lost")
    if engine.events_dropped:
        lost.append(f"{counted(engine.events_dropped, 'event')} dropped by the engine")
    if engine.attached == "figures":
        return [html.Span("figures only", className="health unsure"), html.Span("no event stream", className="lost")]
    if engine.uncertain_since:
        verdict = html.Span(f"not exact since {clock(engine.uncertain_since)} UTC", className="health unsure")
    else:
        verdict = html.Span("exact", className="health exact", title="every figure rests on every event")
    return [verdict, html.Span(", ".join(lost) or "nothing lost", className="lost")]


def alarms(engine: EngineView) -> list[Any]:
    """What must not be overlooked: a fault that is switched on, an engine that has gone quiet."""
    banners = []
    if engine.faults:
        banners.append(
            html.P(
                [
                    html.Strong(f"Fault switched on in this engine: {', '.join(engine.faults)}"),
                    html.Span("It was started to show an incident. Do not serve with it."),
                ],
                className="banner fault",
            )
        )
    if engine.status == "silent":
        text = f"Nothing heard from this engine for {duration(engine.heard_s_ago)}. What is shown is as it was then."
        banners.append(html.P(html.Strong(text), className="banner quiet"))
    if engine.status == "stopped":
        banners.append(html.P(html.Strong("This engine has stopped. What is shown is as it was at the end."),
                              className="banner quiet"))  # fmt: skip
    return banners


def summary(engine: EngineView) -> list[Any]:
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
