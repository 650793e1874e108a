"""The time menu: live or in the past, with buttons to move it, and a form to choose another.

A live window stays live when its length changes, and no window ends in the future.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.monitor.base.text import duration

from . import ui
from .display_text import clock_text
from .links import PagePlace, PageWindow, ago, rfc3339
from .view import Here

SPANS: Final = (
    (60, "last minute"),
    (600, "last 10 minutes"),
    (3600, "last hour"),
    (6 * 3600, "last 6 hours"),
    (86_400, "last day"),
    (7 * 86_400, "last 7 days"),
    (30 * 86_400, "last 30 days"),
)
"""Windows that end now and can be chosen with a click, in seconds. An address without times means the second."""
ALWAYS_OFFERED: Final = 4
LEAST_WINDOW_S: Final = 1.0
ONE_DAY_NS: Final = 86_400_000_000_000
_CLOCK_FORM: Final = r"\d\d:\d\d(:\d\d(\.\d+)?)?"
TIME_FORM: Final = rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK_FORM}Z?|{_CLOCK_FORM}|now(-\d{{1,6}}[smhd])?|\d{{12,14}}"
"""The form of a typed time, 24 hours a day."""


class _Move(NamedTuple):
    sign: str
    words: str
    key: str
    since: str
    until: str


def time_menu(here: Here, now_ns: int, known_s: float, ended: bool) -> list[Any]:
    """Return the time, live or past, and the ways to choose another. `known_s`: for how long the engine is known.
    `ended`: it is live no more.
    """
    place, window = here.place, here.window
    parts: list[Any] = []
    if window.live:
        kind = html.Span("as it was", className="past") if ended else html.Span("live", className="live")
        summary: list[Any] = [kind, _span_in_words(window)]
        if ended and here.engine.at:
            day = f"{here.engine.at[:10]} " if now_ns + ONE_DAY_NS < time.time_ns() else ""
            length = html.Span(f"{_span_in_words(window)}, ", className="roomy")
            until: list[Any] = ["until ", html.Span(day, className="roomy"), f"{clock_text(here.engine.at)} UTC"]
            summary = [kind, html.Span([length, *until])]
    else:
        summary = [html.Span("as it was", className="past"), _past_in_words(here)]
        back = place.but(since="", until="", at="")
        parts.append(html.A("Back to live", href=back, className="button", **ui.key("l", "back to live")))
    buttons = [
        html.A(
            move.sign,
            href=place.but(since=move.since, until=move.until, at=""),
            title=f"{move.words} ({move.key})",
            className="button",
            **ui.aria(label=move.words),
            **ui.key(move.key, move.words),
        )
        for move in _moves(window, now_ns)
    ]
    menu = html.Details(
        [
            html.Summary(summary, className="button", **ui.key("t", "choose the time"), title="Choose the time (t)"),
            html.Div([_spans(place, window, known_s), _time_choices(place, window), _zones()], className="drop"),
        ],
        className="menu",
    )
    return [*parts, menu, html.Span(buttons, className="moves")]


def _moves(window: PageWindow, now_ns: int) -> list[_Move]:
    """Where the buttons lead. Buttons that would leave the range are missing: later at the end, and shorter below a
    second.
    """
    half = (window.until_ns - window.since_ns) // 2
    moves = [_absolute("←", "earlier", "[", window.since_ns - half, window.until_ns - half)]
    if not window.live and window.until_ns < now_ns:
        until = min(window.until_ns + half, now_ns)
        moves.append(_absolute("→", "later", "]", until - 2 * half, until))
    if window.live:
        moves.append(_Move("−", "a longer time", "-", ago(2 * window.seconds), ""))
        if window.seconds >= 2 * LEAST_WINDOW_S:
            moves.append(_Move("+", "a shorter time", "+", ago(window.seconds / 2), ""))
        return moves
    until = max(window.until_ns, min(window.until_ns + half, now_ns))
    moves.append(_absolute("−", "a longer time", "-", window.since_ns - half, until))
    if window.seconds >= 2 * LEAST_WINDOW_S:
        moves.append(_absolute("+", "a shorter time", "+", window.since_ns + half // 2, window.until_ns - half // 2))
    return moves


def _absolute(sign: str, words: str, name: str, since_ns: int, until_ns: int) -> _Move:
    return _Move(sign, words, name, rfc3339(max(0, since_ns)), rfc3339(until_ns))


def _span_in_words(window: PageWindow) -> str:
    return dict(SPANS).get(round(window.seconds)) or f"last {duration(window.seconds)}"


def _past_in_words(here: Here) -> str:
    """Return the time, or the window, with days where they are not that of the engine's now."""

    def then(at: str) -> str:
        return clock_text(at) if here.engine.at and at[:10] == here.engine.at[:10] else f"{at[:10]} {clock_text(at)}"

    if here.place.at:
        return f"at {then(here.place.at)} UTC" if "T" in here.place.at else f"at {here.place.at}"
    since, until = here.window.since, here.window.until
    return f"{then(since)} – {clock_text(until) if since[:10] == until[:10] else then(until)} UTC"


def _spans(place: PagePlace, window: PageWindow, known_s: float) -> html.Ul:
    """As long windows as there is something to see in."""
    offered = [span for number, span in enumerate(SPANS) if number < ALWAYS_OFFERED or SPANS[number - 1][0] < known_s]
    return html.Ul(
        [
            html.Li(
                html.A(
                    words.capitalize(),
                    href=place.but(since=ago(seconds), until="", at=""),
                    **ui.aria(current="true" if window.live and round(window.seconds) == seconds else "false"),
                )
            )
            for seconds, words in offered
        ]
    )


def _time_choices(place: PagePlace, window: PageWindow) -> html.Form:
    """Return a form that goes where a link would: empty fields are left out of the address."""
    hidden = [("engine", place.engine), ("id", place.id), *place.more]
    fields: list[Any] = [*ui.hidden(hidden)]
    moment = place.at if "T" in place.at else ""
    times = (("from", "From", window.since), ("to", "To", window.until), ("at", "At the moment", moment))
    for name, words, value in times:
        fields.append(html.Label([html.Span(words), time_field(name, value)]))
    fields.append(ui.note("Charts mark the selected time. State views show the state at that time."))
    fields.append(html.Button("Show", type="submit"))
    return html.Form(
        fields,
        action=f"/{place.view}",
        method="get",
        key=f"{window.since} {window.until} {moment}" if not window.live else place.since,
    )


def time_field(name: str, value: str) -> Any:
    """Return a field for a time of 24 hours, in the zone that is chosen. `value` is RFC 3339, in UTC."""
    return ui.field(
        "text",
        name,
        value[:19].replace("T", " "),
        pattern=TIME_FORM,
        placeholder="2026-11-21 14:02:11",
        autoComplete="off",
        className="time",
    )


def _zones() -> html.Div:
    """Return a viewer's preferences: a time zone, and dark or light. assets/browser_preferences.js applies and
    remembers it.
    """
    return html.Div(
        [
            html.Span("Times in"),
            html.Button("UTC", type="button", className="button", **ui.data(zone="utc")),
            html.Button("this browser's zone", type="button", className="button", **ui.data(zone="browser")),
            html.Button(
                "◐",
                type="button",
                id="theme-button",
                className="button",
                **ui.aria(label="Dark or light"),
                **ui.data(theme_next=1),
            ),
        ],
        className="zones",
        role="group",
        **ui.aria(label="Time zone and colours"),
    )
