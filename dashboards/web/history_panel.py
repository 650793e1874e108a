"""The event history of one request or block, beside the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.questions.schema import BlockDetail, EventHistoryEntry, RequestDetail

from . import ui
from .display_text import clock_text, family_of, reason_of, sentence
from .links import PagePlace

MAX_HISTORY_LINES = 200
MOST_SPANS = 60


def of_request(place: PagePlace, detail: RequestDetail) -> list[Any]:
    """Return a request: its state, its cost, its blocks, its phases."""
    request, engine = detail.request, detail.engine
    reason = reason_of(request)
    facts = [
        ("For", f"{duration(request.for_s)}, since {clock_text(request.since)} UTC"),
        ("Prompt", counted(request.prompt_tokens, "token")),
        ("From the prefix cache", counted(request.hit_tokens, "token")),
        ("Computed", counted(request.computed_tokens, "token")),
        ("Output", f"{request.output_tokens:,} of at most {counted(request.max_tokens, 'token')}"),
        ("Preempted", f"{counted(request.preemptions, 'time')}, {counted(request.tokens_lost, 'token')} lost"),
    ]
    facts += [(f"Waited {in_words(cause)}", duration(seconds)) for cause, seconds in detail.waited_s.items()]
    if request.client_gone:
        facts.append(("Client", "has gone away"))
    parts: list[Any] = [
        *_head(place, "Request", request.id),
        html.P(
            [ui.dot(family_of(request)), in_words(request.state), html.Span(f", {reason}" if reason else "")],
            className="state",
            title=f"{request.state} {request.reason}".strip(),
        ),
        html.Dl([part for name, value in facts for part in (html.Dt(name), html.Dd(value))], className="facts"),
    ]
    if detail.blocks:
        shared = f", {request.shared_blocks:,} of them shared" if request.shared_blocks else ""
        links = ui.block_links(place, engine, detail.blocks, MOST_SPANS)
        parts += [
            html.H3(f"Holds {counted(request.blocks, 'block')}{shared}"),
            html.P(links, className="blocks"),
            html.P(html.A("Show them on the block map", href=place.to("blocks", engine=engine, id=request.id))),
        ]
    return parts + _event_history(detail.event_history, detail.event_history_complete)


def of_block(place: PagePlace, detail: BlockDetail) -> list[Any]:
    """Return a block: its state, its owners, and its event history."""
    return [
        *_head(place, "Block", f"{detail.block:,}"),
        *_what_it_is(place, detail),
        *_event_history(detail.event_history, whole=True),
    ]


def pointed(place: PagePlace, detail: BlockDetail) -> list[Any]:
    """Return a block in a few lines, for the pointer."""
    return [html.H3(f"Block {detail.block:,}"), *_what_it_is(place, detail)]


POINT_HINT: Final = "Point at a block to see who holds it and why. Click, or press Enter, to keep its event history."
"""Where no block is pointed at."""


def point_here() -> list[Any]:
    """No block is pointed at."""
    return [ui.note(POINT_HINT)]


def unknown(place: PagePlace, message: str) -> list[Any]:
    """Return a note that it does not exist (any more)."""
    return [*_head(place, "Not known", ""), ui.note(sentence(message))]


def _head(place: PagePlace, kind: str, name: str) -> list[Any]:
    close = html.A("Close", href=place.to(f"{place.view}s"), className="close", title="Close (Escape)")
    return [html.Div([html.H2([f"{kind} ", html.Span(name, className="id")]), close], className="head")]


def _what_it_is(place: PagePlace, detail: BlockDetail) -> list[Any]:
    owners: list[Any] = [ui.request_link(place, detail.engine, owner) for owner in detail.owners]
    cached = " · in the prefix cache" if detail.hashed else ""
    what: list[Any] = [
        ui.dot(detail.state.lower().replace("-", "_")),
        f"{detail.state} · {counted(detail.references, 'reference')}{cached} · owned by ",
        *(owners or ["no request"]),
    ]
    return [
        html.P(what, className="state"),
        html.Ul([html.Li([html.Span(link) for link in chain], className="chain") for chain in detail.ownership_chains]),
    ]


def _event_history(lines: Sequence[EventHistoryEntry], whole: bool) -> list[Any]:
    parts: list[Any] = [html.H3("Event history")]
    if not lines:
        return [*parts, ui.note("No event that is kept mentions it.")]
    if not whole:
        parts.append(ui.note("It begins before the events that are kept here."))
    if len(lines) > MAX_HISTORY_LINES:
        parts.append(ui.note(f"The last {MAX_HISTORY_LINES} of {len(lines):,} lines."))
    entries = [
        html.Li([html.Time(clock_text(line.at), dateTime=line.at), line.text]) for line in lines[-MAX_HISTORY_LINES:]
    ]
    return [*parts, html.Ol(entries, className="event-history")]
