"""Alerts as a whole: what is open, silences, deliveries, receivers, and the thresholds in force."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from dash import html

from kvscope.dashboards.web.display_text import clock_text, day_and_clock
from kvscope.dashboards.web.markup import choice, data, field, headings
from kvscope.dashboards.web.silence_forms import LENGTHS, literally, silence_note
from kvscope.dashboards.web.view import Here, PageView
from kvscope.monitor.alert_state import AlertStateView, AlertView, ReceiverView, ThresholdView
from kvscope.monitor.query import Query
from kvscope.monitor.schema import DeliveryView
from kvscope.monitor.text import counted

MAX_SHOWN_ALERTS = 200


def view(query: Query, here: Here) -> PageView:
    """Return all alerts, silences and deliveries that match the filters of the address."""
    state = query.alert_state()
    texts = {finding.id: finding.explanation for finding in query.findings("firing")}
    code, engine = here.place.get("code"), here.place.get("on")

    def is_wanted(one: AlertView | DeliveryView) -> bool:
        return (not code or fnmatchcase(one.code, code)) and (not engine or one.engine == engine)

    opened = [one for one in state.open if is_wanted(one)]
    deliveries = [one for one in state.deliveries if is_wanted(one)]
    sections: dict[str, Any] = {
        "open": html.Section(_open_alerts(here, state, opened, texts), id="open-alerts", className="card scroll")
    }
    if state.receivers:
        sections |= {
            "silences": html.Section(_silence_section(here, state), id="silences", className="card scroll"),
            "deliveries": html.Section(_delivery_section(here, deliveries), id="deliveries", className="card scroll"),
            "receivers": html.Section(_receiver_section(state.receivers), id="receivers", className="card scroll"),
        }
    thresholds = _threshold_section(state.thresholds, alone=not state.receivers)
    return PageView(sections | {"thresholds": html.Section(thresholds, id="thresholds", className="card scroll")})


# -------------------------------------------------------------------- open alerts


def _open_alerts(here: Here, state: AlertStateView, opened: Sequence[AlertView], texts: dict[str, str]) -> list[Any]:
    """Each with its finding, in the words of now."""
    heading = html.H1(f"{counted(len(opened), 'alert')} open")
    if not state.receivers:
        asked = html.Code("monitor serve --alert URL")
        return [
            html.H1("Alerts"),
            html.P(["This service sends no alerts. Start it as ", asked, " to send them."], className="note"),
        ]
    rows = [
        html.Tr(
            [
                html.Td(html.Span(one.severity, className=f"severity {one.severity}")),
                html.Th(
                    html.A(one.code, href=here.place.to("finding", engine=one.engine, id=one.finding)), scope="row"
                ),
                html.Td(html.A(one.engine, href=here.place.to("engine", engine=one.engine), className="name")),
                html.Td(day_and_clock(one.since)),
                html.Td(texts.get(one.finding, one.explanation), className="wrapped-text"),
            ],
            key=one.id,
        )
        for one in opened
    ]
    table = html.Table([headings("Severity", "Finding", "Engine", "Since", "Now"), html.Tbody(rows)])
    return [heading, _alert_filter(here, state), table if rows else html.P("No alert is open.", className="note")]


def _alert_finding(here: Here, one: AlertView) -> str:
    return here.place.to("finding", engine=one.engine, id=one.finding)


def _alert_filter(here: Here, state: AlertStateView) -> html.Form:
    known: list[AlertView | DeliveryView] = [*state.open, *state.deliveries]
    return html.Form(
        [
            field("hidden", "engine", here.place.engine),
            choice("code", "Code", _as_choices(sorted({one.code for one in known})), here.place.get("code")),
            choice("on", "Engine", _as_choices(sorted({one.engine for one in known})), here.place.get("on")),
            html.Button("Show", type="submit"),
        ],
        action="/alerts",
        method="get",
        className="filter",
    )


def _as_choices(values: Sequence[str]) -> list[tuple[str, str]]:
    return [(value, value) for value in values]


# -------------------------------------------------------------------- silences


def _silence_section(here: Here, state: AlertStateView) -> list[Any]:
    rows = [
        html.Tr(
            [
                html.Th(str(one.number), scope="row"),
                html.Td(html.Code(" ".join(one.matchers))),
                html.Td(day_and_clock(one.until)),
                html.Td(one.comment or "no comment", className="wrapped-text"),
                html.Td(_post_button("End", f"/api/alerts/silences/{one.number}/end")),
            ],
            key=str(one.number),
        )
        for one in state.silences
    ]
    table = html.Table([headings("Silence", "Matches", "Until", "Comment", ""), html.Tbody(rows)])
    none = html.P("No silence is set.", className="note")
    return [
        html.H2("Silences"),
        *silence_note(here.place.get("silenced"), state.silences),
        table if rows else none,
        _new_silence(here, state),
    ]


def _new_silence(here: Here, state: AlertStateView) -> html.Details:
    """Return a form that the service's own API takes, by code, by engine, or by both."""
    codes = sorted(
        {threshold.name.rpartition(".")[0] for threshold in state.thresholds} | {one.code for one in state.open}
    )
    matchers = (
        ("Code", [(f"code={code}", code) for code in codes]),
        ("Engine", [(f"engine={literally(engine.engine)}", engine.engine) for engine in here.engines]),
    )
    chosen = [
        html.Label(
            [
                html.Span(words),
                html.Select(
                    [html.Option("any", value=""), *(html.Option(text, value=value) for value, text in values)],
                    name="matchers",
                    **data(value=""),
                ),
            ]
        )
        for words, values in matchers
    ]
    lengths = html.Select(
        [html.Option(words, value=seconds) for seconds, words in LENGTHS], name="seconds", **data(value=LENGTHS[1][0])
    )
    reason = field("text", "comment", "", required="required", placeholder="who is on it, and why")
    return html.Details(
        [
            html.Summary("Create a silence"),
            html.Form(
                [
                    *chosen,
                    html.Label([html.Span("For"), lengths]),
                    html.Label([html.Span("Reason"), reason]),
                    html.Button("Silence", type="submit"),
                    html.P("Choose a code, an engine, or both.", className="note"),
                ],
                action="/api/alerts/silences",
                method="post",
                className="filter",
            ),
        ],
        className="silence",
    )


def _post_button(words: str, action: str) -> html.Form:
    return html.Form(html.Button(words, type="submit", className="button"), action=action, method="post")


# -------------------------------------------------------------------- the rest


def _delivery_section(here: Here, deliveries: Sequence[DeliveryView]) -> list[Any]:
    rows = [
        html.Tr(
            [
                html.Th(day_and_clock(one.created_at), scope="row"),
                html.Td(one.kind),
                html.Td(html.A(one.code, href=here.place.but(code=one.code))),
                html.Td(one.engine, className="name"),
                html.Td(one.receiver),
                html.Td(one.state),
                html.Td(counted(one.tries, "try", "tries")),
                html.Td(one.answer, className="note"),
                html.Td(
                    ""
                    if one.state == "pending" or one.kind == "test"
                    else _post_button("Send again", f"/api/alerts/deliveries/{one.number}/replay")
                ),
            ],
            key=str(one.number),
        )
        for one in deliveries[:MAX_SHOWN_ALERTS]
    ]
    head = headings("At", "Kind", "Code", "Engine", "Receiver", "State", "Tries", "Response", "")
    table = html.Table([head, html.Tbody(rows)])
    return [html.H2("Deliveries"), table if rows else html.P("Nothing was sent.", className="note")]


def _receiver_section(receivers: Sequence[ReceiverView]) -> list[Any]:
    rows = [
        html.Tr(
            [
                html.Th(one.name, scope="row"),
                html.Td(one.host),
                html.Td(counted(one.pending, "message")),
                html.Td(_receiver_state(one)),
                html.Td(_post_button("Test", f"/api/alerts/test?receiver={one.name}")),
            ],
            key=one.name,
        )
        for one in receivers
    ]
    table = html.Table([headings("Receiver", "Host", "Pending", "State", ""), html.Tbody(rows)])
    return [html.H2("Receivers"), table]


def _receiver_state(one: ReceiverView) -> str:
    if one.disabled_at:
        return f"disabled since {clock_text(one.disabled_at)} UTC: it responded that it is gone. A test enables it"
    return f"paused until {clock_text(one.paused_until)} UTC, as it asked" if one.paused_until else "ready"


def _threshold_section(thresholds: Sequence[ThresholdView], *, alone: bool) -> list[Any]:
    """Return all thresholds, unfolded where they are alone on the page."""
    rows = [
        html.Tr(
            [
                html.Th(html.Code(one.name), scope="row"),
                html.Td(f"{one.value:g} {one.unit}", className="n"),
                html.Td("" if one.value == one.default else f"set; default {one.default:g} {one.unit}"),
                html.Td(one.reason, className="wrapped-text"),
            ],
            key=one.name,
        )
        for one in thresholds
    ]
    table = html.Table([headings("Threshold", "In force#", "Changed", "Reason for the default"), html.Tbody(rows)])
    note = html.P(["Change one with ", html.Code("monitor serve --set NAME=VALUE"), "."], className="note")
    folded = html.Details([html.Summary(counted(len(rows), "threshold")), note, table], open=alone)
    return [html.H2("Thresholds in force"), folded]
