"""What stands above every view: the engines, the views of the one that is looked at, the time, and whether what is said
is exact. And what must not be overlooked.
"""

from __future__ import annotations

from typing import Any

from dash import html

from kvscope.dashboards.web.display_text import clock_text, sentence
from kvscope.dashboards.web.links import PagePlace, PageWindow, rfc3339
from kvscope.dashboards.web.markup import aria, field, key
from kvscope.dashboards.web.view import Here, open_findings
from kvscope.dashboards.web.view_registry import tab_of, views_of
from kvscope.monitor.schema import EngineView
from kvscope.monitor.text import counted, duration

SPANS = (("now-1m", "last minute"), ("", "last 10 minutes"), ("now-1h", "last hour"), ("now-6h", "last 6 hours"))
"""What `from` can be with a click."""
QUIET_STATUS = {
    "silent": "nothing was heard from {which} for {ago}. What is shown of it is as it was then",
    "stopped": "{which} has stopped. What is shown of it is as it was at the end",
    "gone": "{which} was not heard since the service began. What is shown of it is as it was last",
}
"""What is said above every view of an engine in such a state."""


def title(here: Here) -> str:
    """Of the window: what is wrong, the view, the engine."""
    if not here.place.view:
        wrong = sum(map(open_findings, here.engines))
        return f"({wrong}) Overview" if wrong else "Overview"
    wrong = open_findings(here.engine)
    tab = tab_of(here.place.view)
    name = f"({wrong}) {here.name}" if wrong else here.name
    return f"{name} · {tab.label}" if tab else name


def header_bar(here: Here, every_s: float = 0) -> list[Any]:
    """All of it, as it stands at the top of the page. `every_s`: the view is made anew only so often; 0: as often as
    one looks.
    """
    return [
        html.Div(
            [
                html.A([html.Span(className="mark", **aria(hidden="true")), "kvscope"], href="/", className="brand"),
                html.Nav(_engines(here), **aria(label="Engines")),
                html.Div(_time_menu(here), id="time"),
                html.Button("?", type="button", id="keys-button", title="Keys (?)", **aria(label="Keys")),
            ],
            className="row",
        ),
        html.Div(
            [
                html.Nav(_tabs(here), id="views", **aria(label="Views")),
                html.Div(health(here.engine, every_s), id="health", role="status", **aria(label="Stream health")),
            ],
            className="row",
        ),
    ]


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
                **aria(current="true" if engine is here.engine else "false"),
            ),
            key=engine.engine,
        )
        for engine in here.engines
    ]
    count = html.Span(f"of {counted(len(here.engines), 'engine')}", className="how")
    summary = html.Summary([*chosen, count], className="engine", **key("e", "choose an engine"))
    return html.Details([summary, html.Ul(others)], className="menu")


def _choice(engine: EngineView) -> list[Any]:
    open_now = open_findings(engine)
    parts: list[Any] = [
        html.Span(className=f"status {engine.status}", **aria(hidden="true")),
        html.Span(engine.engine, className="name"),
        html.Span(engine.status, className="how"),
    ]
    if open_now:
        parts.append(html.Span(f"{open_now:,}", className="badge", title=counted(open_now, "open finding")))
    return parts


def _tabs(here: Here) -> html.Ul:
    chosen = tab_of(here.place.view)
    links = []
    for number, entry in enumerate(views_of(here.engine.signal), start=1):
        count = open_findings(here.engine) if entry.path == "findings" else 0
        links.append(
            html.Li(
                html.A(
                    [entry.label, html.Span(f"{count:,}", className="badge")] if count else entry.label,
                    href=here.place.to(entry.path),
                    **aria(current="page" if entry is chosen else "false"),
                    **key(str(number % 10), entry.label),
                )
            )
        )
    return html.Ul(links)


def is_unread(engine: EngineView) -> bool:
    """Whether the reader behind the engine does not work: nothing about the engine now is known."""
    return engine.status == "unknown" and (engine.signal == "stream" or engine.running is not None)


def health(engine: EngineView, every_s: float) -> list[Any]:
    """Whether figures are exact, and what was lost; and how old they may be."""
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
            html.Span("seen through /metrics only", className="health unsure"),
            *slow,
        ]
    if engine.uncertain_since:
        verdict = html.Span(f"not exact since {clock_text(engine.uncertain_since)} UTC", className="health unsure")
    else:
        verdict = html.Span("exact", className="health exact", title="every figure rests on every event")
    return [verdict, html.Span(", ".join(lost) or "nothing lost", className="lost"), *slow]


def alarms(here: Here, complaint: str) -> list[Any]:
    """What is wrong with the address; a fault that is switched on; an engine that has gone quiet."""
    engine = here.engine
    which = engine.engine if len(here.engines) > 1 and not here.place.view else "this engine"
    banners = [html.P(complaint, className="banner quiet")] if complaint else []
    if engine.faults:
        banners.append(
            html.P(
                [
                    html.Strong(f"Fault switched on in {which}: {', '.join(engine.faults)}"),
                    html.Span("It was started to show an incident. Do not serve with it."),
                ],
                className="banner fault",
            )
        )
    if is_unread(engine):
        unread = f"kvscope cannot read {which} now: see blind.reader-failed. What is shown of it is as it was before"
        banners.append(html.P(html.Strong(sentence(unread)), className="banner quiet"))
    if engine.status in QUIET_STATUS:
        told = QUIET_STATUS[engine.status].format(which=which, ago=duration(engine.last_seen_s_ago))
        banners.append(html.P(html.Strong(sentence(told)), className="banner quiet"))
    return banners


# -------------------------------------------------------------------- time


def _time_menu(here: Here) -> list[Any]:
    """Live, or as it was at a moment; and how to look at another."""
    place, window = here.place, here.window
    parts: list[Any] = []
    if window.live:
        ended = here.engine.status in QUIET_STATUS and here.place.view
        kind = html.Span("as it was", className="past") if ended else html.Span("live", className="live")
        until = f", until {clock_text(here.engine.at)} UTC" if ended and here.engine.at else ""
        summary: list[Any] = [kind, f"{_span_in_words(place, window)}{until}"]
    else:
        summary = [html.Span("as it was", className="past"), _past_in_words(here)]
        back = place.but(since="", until="", at="")
        parts.append(html.A("Back to live", href=back, className="button", **key("l", "back to live")))
    half = (window.until_ns - window.since_ns) // 2
    moves = [
        ("←", "earlier", "[", window.since_ns - half, window.until_ns - half),
        ("→", "later", "]", window.since_ns + half, window.until_ns + half),
        ("−", "a longer time", "-", window.since_ns - half, window.until_ns + half),
        ("+", "a shorter time", "+", window.since_ns + half // 2, window.until_ns - half // 2),
    ]
    buttons = [
        html.A(
            sign,
            href=place.but(since=rfc3339(since), until=rfc3339(until), at=""),
            title=f"{words} ({name})",
            className="button",
            **aria(label=words),
            **key(name, words),
        )
        for sign, words, name, since, until in moves
    ]
    menu = html.Details(
        [
            html.Summary(summary, className="button", **key("t", "choose the time"), title="Choose the time (t)"),
            html.Div([_spans(place), _time_choices(place, window)], className="drop"),
        ],
        className="menu",
    )
    return [*parts, menu, html.Span(buttons, className="moves")]


def _span_in_words(place: PagePlace, window: PageWindow) -> str:
    named = dict(SPANS).get(place.since)
    return named or f"last {duration(window.seconds)}"


def _past_in_words(here: Here) -> str:
    """The moment, or the window; days where they are not that of the engine's now."""

    def then(at: str) -> str:
        return clock_text(at) if here.engine.at and at[:10] == here.engine.at[:10] else f"{at[:10]} {clock_text(at)}"

    if here.place.at:
        return f"at {then(here.place.at)} UTC" if "T" in here.place.at else f"at {here.place.at}"
    since, until = here.window.since, here.window.until
    return f"{then(since)} – {clock_text(until) if since[:10] == until[:10] else then(until)} UTC"


def _spans(place: PagePlace) -> html.Ul:
    return html.Ul(
        [
            html.Li(
                html.A(
                    words.capitalize(),
                    href=place.but(since=since, until="", at=""),
                    **aria(current="true" if place.is_live and place.since == since else "false"),
                )
            )
            for since, words in SPANS
        ]
    )


def _time_choices(place: PagePlace, window: PageWindow) -> html.Form:
    """A form that goes where a link would: empty fields are left out of the address."""
    hidden = [("engine", place.engine), ("id", place.id), *place.more]
    fields: list[Any] = [field("hidden", name, value) for name, value in hidden if value]
    moment = place.at if "T" in place.at else ""
    times = (("from", "From", window.since), ("to", "To", window.until), ("at", "At the moment", moment))
    for name, words, value in times:
        fields.append(html.Label([html.Span(words), field("datetime-local", name, value[:19], step="1")]))
    fields.append(
        html.P(
            "UTC. A moment is marked in what shows a time, and what shows a state is as it was then.", className="note"
        )
    )
    fields.append(html.Button("Show", type="submit"))
    return html.Form(
        fields,
        action=f"/{place.view}",
        method="get",
        key=f"{window.since} {window.until} {moment}" if not window.live else place.since,
    )
