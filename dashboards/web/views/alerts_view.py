"""Alerts as a whole: what is open, silences, deliveries, receivers, and the thresholds in force."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from dash import html
from dash.development.base_component import Component

from kvscope.monitor.base.text import counted
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import (
    AlertStateView,
    AlertView,
    DeliveryView,
    ReceiverView,
    SilenceView,
    ThresholdView,
)

from .. import ui
from ..display_text import clock_text, day_and_clock
from ..view import Here, PageView

LENGTHS: Final = (("3600", "an hour"), ("14400", "4 hours"), ("86400", "a day"), ("604800", "a week"))
MAX_SHOWN_ALERTS = 200


def silence_note(number: str, silences: Sequence[SilenceView]) -> list[Any]:
    """Confirm the silence that was created just now, if it is in force. `number` is from the address. Nothing, if it is
    over.
    """
    return [
        html.P(
            f"Silence {one.number} is set until {day_and_clock(one.until)}: {' '.join(one.matchers)}.",
            role="status",
            className="confirmed",
        )
        for one in silences
        if str(one.number) == number
    ]


def literally(text: str) -> str:
    """Return a pattern that matches only that."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


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
        "open": ui.card(_open_alerts(here, state, opened, texts), "card scroll", id="open-alerts")
    }
    if state.receivers:
        sections |= {
            "silences": ui.card(_silences(here, state), "card scroll", id="silences"),
            "deliveries": ui.card(_deliveries(here, deliveries), "card scroll", id="deliveries"),
            "receivers": ui.card(_receivers(state.receivers), "card scroll", id="receivers"),
        }
    thresholds = _thresholds(state.thresholds, alone=not state.receivers)
    return PageView(sections | {"thresholds": ui.card(thresholds, "card scroll", id="thresholds")})


# -------------------------------------------------------------------- open alerts


def _open_alerts(here: Here, state: AlertStateView, opened: Sequence[AlertView], texts: dict[str, str]) -> list[Any]:
    """Each with its finding, in the words of now."""
    heading = html.H1(f"{counted(len(opened), 'alert')} open")
    if not state.receivers:
        asked = html.Code("monitor serve --alert URL")
        return [
            html.H1("Alerts"),
            ui.note(["This service sends no alerts. Start it as ", asked, " to send them."]),
        ]
    rows = [
        ui.tr(
            html.Td(html.Span(one.severity, className=f"severity {one.severity}")),
            ui.row_head(html.A(one.code, href=here.place.to("finding", engine=one.engine, id=one.finding))),
            html.Td(ui.engine_link(here.place, one.engine)),
            html.Td(day_and_clock(one.since)),
            ui.text_cell(texts.get(one.finding, one.explanation)),
            key=one.id,
        )
        for one in opened
    ]
    table = ui.table(rows, "Severity", "Finding", "Engine", "Since", "Now")
    return [heading, _filter(here, state), table if rows else ui.note("No alert is open.")]


def _filter(here: Here, state: AlertStateView) -> html.Form:
    known: list[AlertView | DeliveryView] = [*state.open, *state.deliveries]
    return html.Form(
        [
            ui.field("hidden", "engine", here.place.engine),
            ui.choice("code", "Code", ui.same(sorted({one.code for one in known})), here.place.get("code")),
            ui.choice("on", "Engine", ui.same(sorted({one.engine for one in known})), here.place.get("on")),
            html.Button("Show", type="submit"),
        ],
        action="/alerts",
        method="get",
        className="filter",
    )


# -------------------------------------------------------------------- silences


def _silences(here: Here, state: AlertStateView) -> list[Any]:
    rows = [
        ui.tr(
            ui.row_head(str(one.number)),
            html.Td(html.Code(" ".join(one.matchers))),
            html.Td(day_and_clock(one.until)),
            ui.text_cell(one.comment or "no comment"),
            html.Td(_post_button("End", f"/api/alerts/silences/{one.number}/end")),
            key=str(one.number),
        )
        for one in state.silences
    ]
    table = ui.table(rows, "Silence", "Matches", "Until", "Comment", "")
    none = ui.note("No silence is set.")
    return [
        html.H2("Silences"),
        *silence_note(here.place.get("silenced"), state.silences),
        table if rows else none,
        _new_silence(here, state),
    ]


def _new_silence(here: Here, state: AlertStateView) -> html.Details:
    """Return a form for a silence by code, by engine, or by both."""
    codes = sorted(
        {threshold.name.rpartition(".")[0] for threshold in state.thresholds} | {one.code for one in state.open}
    )
    matchers = (
        ("Code", [(f"code={code}", code) for code in codes]),
        ("Engine", [(f"engine={literally(engine.engine)}", engine.engine) for engine in here.engines]),
    )
    return silence_form(
        "Create a silence",
        [ui.choice("matchers", words, values, "") for words, values in matchers],
        "Reason",
        "Silence",
        "Choose a code, an engine, or both.",
    )


def silence_form(summary: str, matchers: Sequence[Component], comment: str, submit: str, about: str) -> html.Details:
    """Return a form that the service's own API takes: everyone who may see this page may send it."""
    lengths = html.Select(
        [html.Option(words, value=seconds) for seconds, words in LENGTHS],
        name="seconds",
        **ui.data(value=LENGTHS[1][0]),
    )
    reason = ui.field("text", "comment", "", required="required", placeholder="who is on it, and why")
    fields = [
        *matchers,
        html.Label([html.Span("For"), lengths]),
        html.Label([html.Span(comment), reason]),
        html.Button(submit, type="submit"),
        ui.note(about),
    ]
    form = html.Form(fields, action="/api/alerts/silences", method="post", className="filter")
    return html.Details([html.Summary(summary), form], className="silence")


def _post_button(words: str, action: str) -> html.Form:
    return html.Form(html.Button(words, type="submit", className="button"), action=action, method="post")


# -------------------------------------------------------------------- the rest


def _deliveries(here: Here, deliveries: Sequence[DeliveryView]) -> list[Any]:
    rows = [
        ui.tr(
            ui.row_head(day_and_clock(one.created_at)),
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
            key=str(one.number),
        )
        for one in deliveries[:MAX_SHOWN_ALERTS]
    ]
    table = ui.table(rows, "At", "Kind", "Code", "Engine", "Receiver", "State", "Tries", "Response", "")
    return [html.H2("Deliveries"), table if rows else ui.note("Nothing was sent.")]


def _receivers(receivers: Sequence[ReceiverView]) -> list[Any]:
    rows = [
        ui.tr(
            ui.row_head(one.name),
            html.Td(one.host),
            html.Td(counted(one.pending, "message")),
            html.Td(_receiver_state(one)),
            html.Td(_post_button("Test", f"/api/alerts/test?receiver={one.name}")),
            key=one.name,
        )
        for one in receivers
    ]
    table = ui.table(rows, "Receiver", "Host", "Pending", "State", "")
    return [html.H2("Receivers"), table]


def _receiver_state(one: ReceiverView) -> str:
    if one.disabled_at:
        return f"disabled since {clock_text(one.disabled_at)} UTC: it responded that it is gone. A test enables it"
    return f"paused until {clock_text(one.paused_until)} UTC, as it asked" if one.paused_until else "ready"


def _thresholds(thresholds: Sequence[ThresholdView], *, alone: bool) -> list[Any]:
    """Return all thresholds, unfolded where they are alone on the page."""
    rows = [
        ui.tr(
            ui.row_head(html.Code(one.name)),
            html.Td(f"{one.value:g} {one.unit}", className="n"),
            html.Td("" if one.value == one.default else f"set; default {one.default:g} {one.unit}"),
            ui.text_cell(one.reason),
            key=one.name,
        )
        for one in thresholds
    ]
    table = ui.table(rows, "Threshold", "In force#", "Changed", "Reason for the default")
    how = ui.note(["Change one with ", html.Code("monitor serve --set NAME=VALUE"), "."])
    folded = html.Details([html.Summary(counted(len(rows), "threshold")), how, table], open=alone)
    return [html.H2("Thresholds in force"), folded]
