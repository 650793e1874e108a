"""Requests: the state of each, its reason, its age, its blocks and its waits, by any column, of any kind.

    /requests?q=TEXT&state=STATE&reason=REASON&holding=1&sort=COLUMN&page=N

A column's name with a minus before it sorts the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from dash import html

from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.questions.query import Query
from kvscope.monitor.questions.schema import RequestView

from .. import ui
from ..display_text import family_of, reason_of
from ..links import PagePlace
from ..view import Here, PageView

A_PAGE: Final = 100
MOST_REASONS: Final = 2


class Column(NamedTuple):
    """One column: its name in addresses, its heading, what it means, what it sorts by, how it looks."""

    name: str
    heading: str
    means: str
    key: Callable[[RequestView], Any]
    kind: str = "n"


REQUEST_COLUMNS: Final = (
    Column("id", "Request", "", lambda r: r.id, ""),
    Column("state", "State", "", lambda r: r.state, ""),
    Column("reason", "Reason", "why it is in this state and not another", lambda r: r.reason, ""),
    Column("for", "For", "how long it has been in this state", lambda r: r.for_s),
    Column("blocks", "Blocks", "all blocks that it holds", lambda r: r.blocks),
    Column("shared", "Shared", "blocks among these that other requests hold too", lambda r: r.shared_blocks),
    Column("prompt", "Prompt", "prompt tokens", lambda r: r.prompt_tokens),
    Column(
        "computed",
        "Computed",
        "tokens whose keys and values are in the pool, or were when it ended",
        lambda r: r.computed_tokens,
    ),
    Column("output", "Output", "tokens generated, of the most it may generate", lambda r: r.output_tokens),
    Column(
        "preempted", "Preempted", "times it lost its blocks, and the tokens to compute again", lambda r: r.preemptions
    ),
    Column("waited", "Waited", "all the time that it has waited, by reason", lambda r: sum(r.waited_s.values()), ""),
)
BY_NAME: Final = {column.name: column for column in REQUEST_COLUMNS}
REQUEST_FILTERS: Final = ("q", "state", "reason", "holding", "sort")


def view(query: Query, here: Here) -> PageView:
    """Return the table, with its filters."""
    place = here.place
    every = query.requests(here.name, here.moment)
    found = query.findings("firing", here.name)
    culprits = {request for finding in found for request in finding.culprits.requests}
    wanted = _ordered(place, [one for one in every if _is_wanted(place, one)], culprits)
    parts = [html.H1("Requests"), _filter(place, every)]
    if not every:
        parts.append(ui.note("No request was received yet."))
    else:
        parts.append(ui.note(_headline(every, wanted)))
        parts += _table(place, wanted, culprits) if wanted else []
    return PageView({"requests": ui.card(parts, id="requests")})


def _is_wanted(place: PagePlace, request: RequestView) -> bool:
    return (
        place.get("q").lower() in request.id.lower()
        and place.get("state", request.state) == request.state
        and place.get("reason", request.reason) == request.reason
        and (not place.get("holding") or request.blocks > 0)
    )


def _ordered(place: PagePlace, requests: list[RequestView], culprits: Collection[str]) -> list[RequestView]:
    """Return them by the column in the address, or else culprits of open findings first, then by time in their state,
    and those that have ended last.
    """
    asked = place.get("sort")
    column = BY_NAME.get(asked.removeprefix("-"))
    if column is None:
        return sorted(requests, key=lambda one: (one.ended, one.id not in culprits))
    return sorted(requests, key=column.key, reverse=asked.startswith("-"))


def _headline(every: Sequence[RequestView], wanted: Sequence[RequestView]) -> str:
    if not wanted:
        return f"None of {counted(len(every), 'request')} matches."
    alive, ended = (sum(one.ended == is_so for one in wanted) for is_so in (False, True))
    words = f"{counted(alive, 'request')} alive or holding blocks"
    if ended:
        words += f", and the last {f'{ended:,} ' if ended > 1 else ''}that ended"
    return f"{words}; {len(every) - len(wanted):,} others do not match." if len(wanted) < len(every) else f"{words}."


# -------------------------------------------------------------------- what it is narrowed to


def _filter(place: PagePlace, every: Sequence[RequestView]) -> html.Form:
    kept = (
        ("engine", place.engine),
        ("from", place.since),
        ("to", place.until),
        ("at", place.at),
        ("sort", place.get("sort")),
    )
    fields: list[Any] = [*ui.hidden(kept)]
    fields.append(html.Label([html.Span("Request id has"), ui.field("search", "q", place.get("q"))]))
    for name, words, values in (
        ("state", "State", sorted({one.state for one in every})),
        ("reason", "Reason", sorted({one.reason for one in every if one.reason})),
    ):
        fields.append(ui.choice(name, words, [(value, in_words(value)) for value in values], place.get(name)))
    fields.append(ui.choice("holding", "Holds blocks", [("1", "yes")], place.get("holding")))
    fields.append(html.Button("Show", type="submit"))
    if any(place.get(name) for name in REQUEST_FILTERS if name != "sort"):
        fields.append(
            html.A("Show all", href=place.but(**dict.fromkeys(REQUEST_FILTERS, ""), page=""), className="button")
        )
    key = " ".join(place.get(name) for name in REQUEST_FILTERS)
    return ui.filter_form(fields, "requests", key)


# -------------------------------------------------------------------- the table


def _table(place: PagePlace, wanted: Sequence[RequestView], culprits: Collection[str]) -> list[Any]:
    pages = max(1, -(-len(wanted) // A_PAGE))
    asked = place.get("page", "1")
    number = min(max(int(asked), 1), pages) if asked.isdecimal() else 1
    shown = wanted[(number - 1) * A_PAGE : number * A_PAGE]
    rows = [_row(place, request, request.id in culprits) for request in shown]
    table = html.Table([html.Thead(html.Tr([_heading(place, column) for column in REQUEST_COLUMNS])), html.Tbody(rows)])
    parts: list[Any] = [
        html.Div(table, className="scroll wide", tabIndex="0", role="region", **ui.aria(label="Table of requests"))
    ]
    if pages > 1:
        parts.append(_turner(place, number, pages))
    return parts


def _heading(place: PagePlace, column: Column) -> html.Th:
    """Return a link that sorts by it, the largest number or the first name first, and again the other way round."""
    asked = place.get("sort")
    down, up = f"-{column.name}", column.name
    first, other = (down, up) if column.kind or column.name == "waited" else (up, down)
    sign = {down: " ▾", up: " ▴"}.get(asked, "")
    link = html.A([column.heading, sign], href=place.but(sort=other if asked == first else first, page=""))
    sorted_so = {down: "descending", up: "ascending"}.get(asked, "none")
    return html.Th(link, className=column.kind, title=column.means, scope="col", **ui.aria(sort=sorted_so))


def _turner(place: PagePlace, number: int, pages: int) -> html.Nav:
    parts: list[Any] = []
    if number > 1:
        parts.append(html.A("← Before", href=place.but(page=str(number - 1)), className="button"))
    parts.append(ui.small_note(f"page {number:,} of {pages:,}"))
    if number < pages:
        parts.append(html.A("After →", href=place.but(page=str(number + 1)), className="button"))
    return html.Nav(parts, className="turner", **ui.aria(label="Pages"))


def _row(place: PagePlace, request: RequestView, culprit: bool) -> html.Tr:
    lost = f" (−{request.tokens_lost:,})" if request.tokens_lost else ""
    cells: list[Any] = [
        ui.row_head(ui.request_link(place, place.engine, request.id)),
        html.Td([ui.dot(family_of(request)), in_words(request.state)], title=request.state),
        html.Td(reason_of(request), title=request.reason),
        html.Td(duration(request.for_s), className="n"),
        ui.number_cell(request.blocks),
        ui.number_cell(request.shared_blocks),
        ui.number_cell(request.prompt_tokens),
        ui.number_cell(request.computed_tokens),
        html.Td(f"{request.output_tokens:,} / {request.max_tokens:,}", className="n"),
        html.Td(f"{request.preemptions:,}{lost}", className="n"),
        html.Td(_waited(request)),
    ]
    kind = "culprit" if culprit else "ended" if request.ended else ""
    return html.Tr(cells, className=kind, key=str(request.number))


def _waited(request: RequestView) -> str:
    """Return the reasons that took longest."""
    longest = sorted(request.waited_s.items(), key=lambda wait: -wait[1])
    reasons = [f"{duration(seconds)} {in_words(cause)}" for cause, seconds in longest[:MOST_REASONS] if seconds > 0]
    return ", ".join(reasons)
