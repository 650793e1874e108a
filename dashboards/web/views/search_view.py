"""Requests by a part of their id, over all engines and the history.

/search?q=PART&of=ENGINE&from=TIME&to=TIME
"""

from __future__ import annotations

from typing import Any, Final

from dash import html

from kvscope.monitor.base.text import counted, in_words
from kvscope.monitor.questions.availability import need_of
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import FoundRequest, RequestSearch

from .. import ui
from ..display_text import day_and_clock
from ..links import wall_ns
from ..view import Here, PageView

MOST_FOUND: Final = 100


def view(query: Query, here: Here) -> PageView:
    """Return the form, and the results for the address. Without a time in the address, all of the past is searched."""
    part, engine = here.place.get("q"), here.place.get("of")
    sections: dict[str, Any] = {"head": html.Header([html.H1("Search a request"), _form(here, part, engine)])}
    if part:
        since = here.window.since if here.place.since else ""
        until = here.window.until if here.place.until else ""
        found = query.find_request(part, engine, since, until, MOST_FOUND)
        sections["found"] = ui.card(_found(here, part, found), id="found")
    return PageView(sections)


def _form(here: Here, part: str, engine: str) -> html.Form:
    kept = (("engine", here.place.engine), ("from", here.place.since), ("to", here.place.until))
    fields: list[Any] = [*ui.hidden(kept)]
    engines = ui.same(one.engine for one in here.engines if one.signal == "stream")
    fields += [
        html.Label([html.Span("Request id has"), ui.field("search", "q", part)]),
        ui.choice("of", "Engine", engines, engine, none="every engine"),
        html.Button("Search", type="submit"),
    ]
    return ui.filter_form(fields, "search", f"{part} {engine}")


def _found(here: Here, part: str, found: RequestSearch) -> list[Any]:
    if not found.requests:
        headline = f"No request has {part!r} in its id"
    elif found.is_complete:
        headline = f"{counted(len(found.requests), 'request')} with {part!r}"
    else:
        headline = f"The latest {counted(len(found.requests), 'request')} with {part!r}"
    parts: list[Any] = [html.H2(headline)]
    if not found.is_complete:
        reached = day_and_clock(found.searched_since) if found.searched_since else "the beginning"
        parts.append(ui.note(f"The search reached back to {reached}. Narrow it by engine or time."))
    if any(engine.signal != "stream" for engine in here.engines):
        parts.append(ui.note(f"Engines without one are left out: {need_of('find_request')}."))
    if found.requests:
        rows = [_found_row(here, one) for one in found.requests]
        table = ui.table(rows, "Request", "Engine", "First seen", "State")
        parts.append(html.Div(table, className="scroll", **ui.aria(label="Requests")))
    return parts


def _found_row(here: Here, one: FoundRequest) -> html.Tr:
    there = {"engine": one.engine, "since": "", "until": "", "at": one.at}
    link = html.A(one.id, href=here.place.to("request", **there, id=one.id), className="id")
    seen = day_and_clock(one.first_seen) if one.first_seen and wall_ns(one.first_seen, 0) else ""
    cells = [ui.row_head(link), html.Td(one.engine), html.Td(seen)]
    state = in_words(one.state) if one.state else "in the history"
    return ui.tr(*cells, html.Td(state, title=one.state), key=f"{one.engine} {one.epoch} {one.number}")
