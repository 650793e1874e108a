"""The header above every view: the engines, the views of the chosen one, the time, and whether the data is exact. And
what must not be overlooked.
"""

from __future__ import annotations

import time
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, duration
from kvscope.monitor.questions.schema import EngineView

from . import ui
from .display_text import clock_text, is_unread, sentence, slow_text
from .time_menu import time_menu
from .view import FLEET_PATH, Here, engine_now_ns, open_findings
from .view_registry import tab_of, views_of

VIEW_KEYS: Final = "1234567890adgs"
"""Keys of the views in the navigation, in its order."""
MOST_IN_MENU: Final = 50
"""Engines, the worst off first."""
RECORDED_BEFORE_S: Final = 120
"""Twice the longest usual time between two scrapes."""
QUIET_STATUS = {
    "silent": "nothing was received from {which} for {ago}. {shown}",
    "stopped": "{which} has stopped. {shown}",
    "gone": "{which} was not received since the service began. {shown}",
}
"""The notice above every view of an engine in such a state."""
SEEN_THROUGH: Final = {"metrics": "/metrics", "prometheus": "Prometheus", "log": "its log", "kv-events": "KV events"}


def title(here: Here) -> str:
    """Return the title of the window: the problem, the view, the engine."""
    if not here.place.view:
        wrong = sum(map(open_findings, here.engines))
        return f"({wrong}) Overview" if wrong else "Overview"
    wrong = open_findings(here.engine)
    tab = tab_of(here.place.view)
    name = f"({wrong}) {here.name}" if wrong else here.name
    return f"{name} · {tab.label}" if tab else name


def header_bar(here: Here, known_s: float = 0, every_s: float = 0) -> list[Any]:
    """All of it, as it stands at the top of the page. `known_s`: how much time there is to look at. `every_s`: the
    interval at which the view is rendered again (0: at every tick).
    """
    ended = _is_over(here.engine) if here.place.view else all(map(_is_over, here.engines))
    return [
        html.Div(
            [
                html.A([html.Span(className="mark", **ui.aria(hidden="true")), "kvscope"], href="/", className="brand"),
                html.Nav(_engines(here), **ui.aria(label="Engines")),
                *_faults(here.engine),
                *([_search(here)] if any(engine.signal == "stream" for engine in here.engines) else []),
                html.Div(time_menu(here, engine_now_ns(here.engine), known_s, ended), id="time"),
                html.Button("?", type="button", id="keys-button", title="Keys (?)", **ui.aria(label="Keys")),
            ],
            className="row",
        ),
        html.Div(
            [
                html.Nav(_tabs(here), id="views", **ui.aria(label="Views")),
                html.Div(health(here.engine, every_s), id="health", role="status", **ui.aria(label="Stream health")),
            ],
            className="row",
        ),
    ]


def _is_over(engine: EngineView) -> bool:
    """Whether nothing of it is received now: it has gone quiet, or it is a recording, which ended long ago."""
    is_recording = time.time_ns() - engine_now_ns(engine) > RECORDED_BEFORE_S * 10**9
    return engine.status in QUIET_STATUS or is_unread(engine) or is_recording


def _search(here: Here) -> html.Form:
    """Search a request, over all engines and the history. Engines that are seen through metrics only name none."""
    name = ui.field("search", "q", here.place.get("q"), placeholder="Request id")
    fields = [
        ui.field("hidden", "engine", here.place.engine),
        html.Label([html.Span("Search a request", className="unseen"), name]),
    ]
    return html.Form(fields, action="/search", method="get", className="finder", role="search")


def _engines(here: Here) -> Any:
    chosen = _choice(here.engine)
    if len(here.engines) == 1:
        return html.Div(chosen, className="engine")
    tab = tab_of(here.place.view)
    others = [
        html.Li(
            html.A(
                _choice(engine),
                href=here.place.to(tab.path if tab and tab.path else "engine", engine=engine.engine),
                className="engine",
                **ui.aria(current="true" if engine is here.engine else "false"),
            ),
            key=engine.engine,
        )
        for engine in here.engines[:MOST_IN_MENU]
    ]
    if len(here.engines) > MOST_IN_MENU:
        rest = f"{len(here.engines) - MOST_IN_MENU:,} more in the fleet view"
        others.append(html.Li(html.A(rest, href=here.place.to(FLEET_PATH, engine="")), key=" more"))
    count = html.Span(f"of {counted(len(here.engines), 'engine')}", className="how")
    summary = html.Summary([*chosen, count], className="engine", **ui.key("e", "choose an engine"))
    return html.Details([summary, html.Ul(others)], className="menu")


def _choice(engine: EngineView) -> list[Any]:
    open_now = open_findings(engine)
    parts: list[Any] = [
        ui.status_dot(engine.status),
        html.Span(engine.engine, className="name"),
        html.Span(
            engine.status,
            className="how",
            title=sentence(slow_text(engine.slow)) if engine.slow else ", ".join(engine.status_findings) or None,
        ),
    ]
    if open_now:
        parts.append(html.Span(f"{open_now:,}", className="badge", title=counted(open_now, "open finding")))
    return parts


def _faults(engine: EngineView) -> list[html.Span]:
    """Return a chip for an engine that was started to show an incident."""
    if not engine.faults:
        return []
    about = f"Started to show an incident. Do not serve with it. Switched on: {', '.join(engine.faults)}"
    return [html.Span(counted(len(engine.faults), "fault") + " switched on", className="chip fault", title=about)]


def _tabs(here: Here) -> html.Ul:
    chosen = tab_of(here.place.view)
    links = []
    for name, entry in zip(VIEW_KEYS, views_of(here.engine.signal), strict=False):
        count = open_findings(here.engine) if entry.path == "findings" else 0
        links.append(
            html.Li(
                html.A(
                    [entry.label, html.Span(f"{count:,}", className="badge")] if count else entry.label,
                    href=here.place.to(entry.path),
                    **ui.aria(current="page" if entry is chosen else "false"),
                    **ui.key(name, entry.label),
                )
            )
        )
    return html.Ul(links)


def health(engine: EngineView, every_s: float) -> list[Any]:
    """Return whether the data is exact, with losses, and how old it may be."""
    slow = (
        [
            html.Span(
                f"updated every {duration(every_s)}",
                className="lost",
                title="Making this view takes long: the stream is read first",
            )
        ]
        if every_s
        else []
    )
    lost = []
    if engine.batches_lost:
        lost.append(f"{engine.batches_lost:,} {'batch' if engine.batches_lost == 1 else 'batches'} lost")
    if engine.events_dropped:
        lost.append(f"{counted(engine.events_dropped, 'event')} dropped by the engine")
    if is_unread(engine):
        return [html.Span("not read now", className="health unsure"), *slow]
    if engine.signal == "metrics":
        return [
            html.Span(f"seen through {SEEN_THROUGH[engine.known_by]} only", className="health unsure"),
            *slow,
        ]
    if engine.status in QUIET_STATUS:
        since = f" since {clock_text(engine.status_since)} UTC" if engine.status_since else ""
        verdict = html.Span(f"not received{since}", className="health unsure", title="Its state now is not known")
    elif engine.uncertain_since:
        verdict = html.Span(f"not exact since {clock_text(engine.uncertain_since)} UTC", className="health unsure")
    else:
        verdict = html.Span("exact", className="health exact", title="No event is missing: every figure is exact")
    return [verdict, html.Span(", ".join(lost) or "nothing lost", className="lost"), *slow]


def alarms(here: Here, complaint: str) -> list[Any]:
    """Return the alarms: an error in the address, an engine that has gone quiet."""
    engine = here.engine
    which = engine.engine if len(here.engines) > 1 and not here.place.view else "this engine"
    banners = [html.P(complaint, className="banner quiet")] if complaint else []
    shown = f"This page shows it {'at the moment that you chose' if here.moment else 'when it was last received'}"
    if is_unread(engine):
        unread = f"kvscope cannot read {which} now: see blind.reader-failed. {shown}"
        banners.append(html.P(html.Strong(sentence(unread)), className="banner quiet"))
    if engine.status in QUIET_STATUS:
        text = QUIET_STATUS[engine.status].format(which=which, ago=duration(engine.last_seen_s_ago), shown=shown)
        banners.append(html.P(html.Strong(sentence(text)), className="banner quiet"))
    return banners
