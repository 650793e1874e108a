"""Requests: where each one is, why, since when, and what it holds; and the story of the one that is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from dash import html

from dashboards.web import story
from dashboards.web.links import Place
from dashboards.web.markup import aria, dot, request_link
from dashboards.web.view import Here, View
from dashboards.web.words import family_of, reason_of
from monitor.query import NotKnown, Query, counted, duration
from monitor.views import RequestView

MOST_LIVE = 150
MOST_ENDED = 20
COLUMNS = (
    ("Request", "", ""),
    ("State", "", ""),
    ("Reason", "", "why it is in this state and not another"),
    ("For", "n", "how long it has been in this state"),
    ("Blocks", "n", "blocks in its table now"),
    ("Prompt", "n", "prompt tokens"),
    ("Computed", "n", "tokens whose keys and values are in the pool, or were when it ended"),
    ("Output", "n", "tokens generated, of the most it may generate"),
    ("Preempted", "n", "times it lost its blocks, and the tokens to compute again"),
)


def view(query: Query, here: Here) -> View:
    """The table; beside it, at /request, the story of the request `id`."""
    found = query.find("firing", here.name)
    culprits = {request for finding in found for request in finding.culprits.requests}
    table = html.Section(
        _table(here.place, query.requests(here.name, here.moment), culprits), id="requests", className="card"
    )
    return View({"requests": table}, _story(query, here.place, here.moment) if here.place.view == "request" else "")


def _story(query: Query, place: Place, moment: str) -> list[Any]:
    try:
        return story.of_request(place, query.request(place.engine, place.id, moment))
    except NotKnown as error:
        return story.unknown(place, str(error))


def _table(place: Place, requests: Sequence[RequestView], culprits: Collection[str]) -> list[Any]:
    """Culprits of open findings first, then as the query gives them: the longest in their state first."""
    live = [request for request in requests if not request.ended]
    ended = [request for request in requests if request.ended]
    live.sort(key=lambda request: request.id not in culprits)
    shown = live[:MOST_LIVE] + ended[:MOST_ENDED]
    rows = [_row(place, request, request.id in culprits) for request in shown]
    header = html.Tr([html.Th(name, className=kind, title=means, scope="col") for name, kind, means in COLUMNS])
    notes = [f"{counted(len(live), 'request')} alive or holding blocks"]
    if len(live) > MOST_LIVE:
        notes.append(f"the first {MOST_LIVE} are shown")
    if ended:
        notes.append(f"then the last {counted(min(len(ended), MOST_ENDED), 'request')} that ended")
    if not rows:
        return [html.H1("Requests"), html.P("No request has been heard of yet.", className="note")]
    return [
        html.H1("Requests"),
        html.P(", ".join(notes) + ".", className="note"),
        html.Div(html.Table([html.Thead(header), html.Tbody(rows)]), className="scroll", tabIndex="0", role="region",
                 **aria(label="Table of requests")),
    ]  # fmt: skip


def _row(place: Place, request: RequestView, culprit: bool) -> html.Tr:
    lost = f" (−{request.tokens_lost:,})" if request.tokens_lost else ""
    cells: list[Any] = [
        html.Th(request_link(place, place.engine, request.id), scope="row"),
        html.Td([dot(family_of(request)), request.state]),
        html.Td(html.Code(reason_of(request))),
        html.Td(duration(request.for_s), className="n"),
        html.Td(f"{request.blocks:,}", className="n"),
        html.Td(f"{request.prompt_tokens:,}", className="n"),
        html.Td(f"{request.computed_tokens:,}", className="n"),
        html.Td(f"{request.output_tokens:,} / {request.max_tokens:,}", className="n"),
        html.Td(f"{request.preemptions:,}{lost}", className="n"),
    ]
    kind = "culprit" if culprit else "ended" if request.ended else ""
    return html.Tr(cells, className=kind, key=str(request.number))
