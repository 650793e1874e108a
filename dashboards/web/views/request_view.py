"""One request: its phases as a waterfall, its waits down to the roots, and its conditions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from dash import html

from kvscope.monitor.base.errors import NotKnown
from kvscope.monitor.base.text import WORDS, counted, duration, in_words
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import ConditionView, PhaseView, RequestDetail, Wait

from .. import history_panel, ui
from ..display_text import clock_text, sentence
from ..links import PagePlace
from ..view import Here, PageView

MOST_PHASES: Final = 80
PHASE_FAMILIES: Final = {"RUNNING": "running", "UNACCOUNTED": "unaccounted", "FREE_DEFERRED": "finished"}


def view(query: Query, here: Here) -> PageView:
    """Return the details of request `id`, with its event history beside it."""
    place = here.place
    try:
        detail = query.request(here.name, place.id, here.moment)
    except NotKnown as error:
        back = html.A("All requests", href=place.to("requests"))
        parts = [html.H1("Request"), ui.note(sentence(str(error))), html.P(back)]
        return PageView({"not-known": ui.card(parts)})
    sections: dict[str, Any] = {
        "head": html.H1(["Request ", html.Span(detail.request.id, className="id")]),
        "life": ui.card(_waterfall(detail), label="Phases"),
    }
    if detail.waits is not None:
        sections["waits"] = ui.card(_waits(place, detail.waits), label="What it waits for")
    conditions = html.Table(html.Tbody([_condition(one) for one in detail.conditions]))
    sections["conditions"] = ui.card([html.H2("Conditions"), conditions], label="Conditions")
    return PageView(sections, history_panel.of_request(place, detail))


# -------------------------------------------------------------------- the waterfall


def _waterfall(detail: RequestDetail) -> list[Any]:
    """Return a bar for each state, from when to when, with recomputed parts hatched."""
    heading = html.H2("Phases")
    phases = detail.phases[-MOST_PHASES:]
    known = [phase for phase in phases if phase.since]
    if not known:
        return [heading, ui.note("No event about it is kept.")]
    began = _began_s(known[0])
    lasted = [0.0 if _is_past(phase) else phase.for_s for phase in known]
    whole = max(_began_s(phase) + seconds for phase, seconds in zip(known, lasted, strict=True)) - began or 1.0
    rows = [
        _phase(phase, (_began_s(phase) - began) / whole, seconds / whole)
        for phase, seconds in zip(known, lasted, strict=True)
    ]
    left = len(detail.phases) - len(phases)
    notes = [f"{duration(whole)} from {clock_text(known[0].since)} UTC."]
    if left:
        notes.append(f"{counted(left, 'earlier state')} left out.")
    if any(phase.recomputed_tokens for phase in phases):
        notes.append("Hatched: computed before, lost to a preemption, and computed again.")
    columns = (
        ("State", ""),
        ("Why", ""),
        ("Timeline", "rod"),
        ("For", "n"),
        ("Blocks", "n"),
        ("Tokens computed", "n"),
    )
    header = html.Tr([html.Th(name, className=kind, scope="col") for name, kind in columns])
    table = html.Table([html.Thead(header), html.Tbody(rows)], className="waterfall")
    return [heading, ui.note(" ".join(notes)), html.Div(table, className="wide")]


def _is_past(phase: PhaseView) -> bool:
    """Return whether it has ended and holds nothing any more: the time since then is none of its phases."""
    return phase.state.startswith("FINISHED") and not phase.blocks


def _began_s(phase: PhaseView) -> float:
    assert phase.since is not None
    return datetime.fromisoformat(phase.since).timestamp()


def _phase(phase: PhaseView, starts: float, lasts: float) -> html.Tr:
    ended = phase.state.startswith("FINISHED")
    by_state = "none" if ended else "waiting"
    family = PHASE_FAMILIES.get(phase.reason) or PHASE_FAMILIES.get(phase.state, by_state)
    again = f"{100 * phase.recomputed_tokens / phase.phase_tokens:.1f}%" if phase.phase_tokens else "0"
    bar = html.Span(
        html.Span(className="again", style={"width": again}),
        className=f"length {family}",
        style={"marginLeft": f"{100 * starts:.2f}%", "width": f"{100 * lasts:.2f}%"},
    )
    computed = f"{phase.phase_tokens:,}" if phase.phase_tokens else ""
    if phase.recomputed_tokens:
        computed += f" ({phase.recomputed_tokens:,} again)"
    return ui.tr(
        html.Th(in_words(phase.state), scope="row", title=phase.state),
        html.Td(in_words(phase.reason) if phase.reason else "", title=phase.reason),
        html.Td(bar, className="rod"),
        html.Td(duration(phase.for_s), className="n"),
        ui.number_cell(phase.blocks),
        html.Td(computed, className="n"),
        key=f"{phase.since} {phase.state}",
    )


# -------------------------------------------------------------------- what it waits for


def _waits(place: PagePlace, wait: Wait) -> list[Any]:
    return [
        html.H2("What it waits for"),
        ui.note("Holders of the blocks that it needs, the largest first, and what each of them waits for."),
        html.Ul(_wait_item(place, wait), className="waits"),
    ]


def _wait_item(place: PagePlace, wait: Wait) -> html.Li:
    """One that waits or is waited for, over those that it waits for."""
    before, name, after = wait.text.partition(wait.request) if wait.request else (wait.text, "", "")
    link = ui.request_link(place, place.engine, name) if name else ""
    text: list[Any] = [before, link, after] if name else [before]
    gives = [html.Span(counted(wait.blocks, "block"), className="gives")] if wait.blocks else []
    below: Sequence[Any] = [html.Ul([_wait_item(place, one) for one in wait.waits_for])] if wait.waits_for else []
    return html.Li([html.Span([*gives, *text], className="" if below else "root"), *below])


# -------------------------------------------------------------------- conditions


def _condition(one: ConditionView) -> html.Tr:
    return ui.tr(
        html.Th(_condition_name(one.name), scope="row", title=one.name),
        html.Td("yes" if one.holds else "no"),
        html.Td(f"since {clock_text(one.since)}" if one.since else ""),
        html.Td(WORDS.get(one.reason, one.reason), title=one.reason),
        key=one.name,
    )


def _condition_name(name: str) -> str:
    """`Blocks freed` of BlocksFreed."""
    return re.sub(r"(?<=[a-z])[A-Z]", lambda capital: f" {capital[0].lower()}", name)
