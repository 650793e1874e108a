"""The building blocks of several sections.

Sections are trees of Dash's HTML components that assets/kvscope.js renders: Dash itself would throw the old elements
away at each update, and with them focus, selection and what was unfolded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dash import dcc, html

from .display_text import spans
from .links import PagePlace, is_stream_position


def aria(**names: str) -> dict[str, Any]:
    """Attributes `aria-…`, which are no Python names."""
    return {f"aria-{name}": value for name, value in names.items()}


def data(**values: object) -> dict[str, Any]:
    """Attributes `data-…`, for the page's own scripts."""
    return {f"data-{name.replace('_', '-')}": str(value) for name, value in values.items()}


def key(name: str, does: str) -> dict[str, Any]:
    """Return attributes of a link or a button that a key of the keyboard presses too. `?` lists them."""
    return data(key=name, does=does)


def command(text: str, **more: Any) -> html.Div:
    """Return a command with a button that copies it."""
    button = html.Button("Copy", type="button", className="button", **data(copy=1))
    return html.Div([html.Code(text, **more), button], className="command")


def field(kind: str, name: str, value: str, **more: str) -> dcc.Input:
    """Return a field of a form that goes to the address its fields make. `value` is its initial value."""
    attributes: dict[str, Any] = {"type": kind, "name": name, "value": value, **more}
    return dcc.Input(**attributes)


def choice(name: str, words: str, values: Sequence[tuple[str, str]], chosen: str, none: str = "any") -> html.Label:
    """Return a labelled field of such a form that has one of the values, each with its label, or `none`."""
    options = [html.Option(none, value=""), *(html.Option(text, value=value) for value, text in values)]
    if chosen not in ("", *(value for value, _ in values)):
        options.append(html.Option(chosen, value=chosen))
    return html.Label([html.Span(words), html.Select(options, name=name, **data(value=chosen))])


def filter_form(fields: Sequence[Any], view: str, key: str) -> html.Form:
    """Return a form that works like links: its choice is in the address of the view. It is made anew with its `key`."""
    return html.Form(fields, action=f"/{view}", method="get", className="filter", key=key, role="search")


def same(values: Iterable[str]) -> list[tuple[str, str]]:
    """Return values of a choice that are their own labels."""
    return [(value, value) for value in values]


def legend_item(colour: str | None, label: Any, *figures: tuple[str, str], **more: Any) -> html.Li:
    """Return a line of a legend: a swatch, what it stands for, and its figures, each with its class."""
    style: dict[str, Any] = {"style": {"backgroundColor": colour}} if colour is not None else {}
    parts = [html.Span(className="swatch", **style), html.Span(label, className="what")]
    return html.Li([*parts, *(html.Span(text, className=kind) for text, kind in figures)], **more)


def dot(family: str) -> html.Span:
    """Return a dot in the colour of a block state, which is a class of the style sheet."""
    return html.Span(className=f"dot {family}", **aria(hidden="true"))


def request_link(place: PagePlace, engine: str, name: str) -> html.A:
    """Return a request's name, which leads to its event history."""
    return html.A(name, href=place.to("request", engine=engine, id=name), className="id")


def block_links(place: PagePlace, engine: str, blocks: Sequence[int], most: int) -> list[Any]:
    """Return block ids as links, an unbroken run of them as one: at most that many, and how many more there are."""
    runs = spans(blocks)
    links: list[Any] = [
        html.A(
            f"{first}" if first == last else f"{first}–{last}",
            href=place.to("block", engine=engine, id=str(first)),
            className="id",
        )
        for first, last in runs[:most]
    ]
    return links + and_more(len(runs) - most)


def event_link(place: PagePlace, engine: str, position: str) -> html.A | html.Span:
    """Return the position of an event, which leads to the pool as it was then. A scrape or a line of a log leads
    nowhere.
    """
    if not is_stream_position(position):
        return html.Span(position)
    # Without the life of the engine, which is long, and the same for nearly all that a page has.
    words = position.partition("/")[2] or position
    there = place.to("blocks", engine=engine, at=position)
    return html.A(words, href=there, title=f"{position}: the pool at that event", className="id")


def headings(*names: str) -> html.Thead:
    """Return the head of a table. `#` behind a name marks numbers."""
    return html.Thead(
        html.Tr(
            [
                html.Th(name.removesuffix("#"), scope="col", className="n" if name.endswith("#") else "")
                for name in names
            ]
        )
    )


def and_more(count: int) -> list[Any]:
    """`and 12 more`, if there are."""
    return [html.Span(f"and {count:,} more", className="rest")] if count > 0 else []


def table(rows: Sequence[html.Tr], *columns: str) -> html.Table:
    """Return a table under its headings. `#` behind a name marks numbers."""
    return html.Table([headings(*columns), html.Tbody(rows)])


def row_head(children: Any) -> html.Th:
    """Return the cell that names a row."""
    return html.Th(children, scope="row")


def number_cell(value: float) -> html.Td:
    """Return a cell with a number."""
    return html.Td(f"{value:,}", className="n")


def text_cell(children: Any) -> html.Td:
    """Return a cell with a text of several lines."""
    return html.Td(children, className="wrapped-text")


def note(children: Any) -> html.P:
    """Return a paragraph that explains what is beside it."""
    return html.P(children, className="note")


def small_note(children: Any) -> html.Span:
    """Return a remark within a line or a cell."""
    return html.Span(children, className="note")


def card(children: Any, kind: str = "card", *, id: str = "", label: str = "") -> html.Section:
    """Return a section of a view. `kind`: its classes in the style sheet. `label`: its name for screen readers."""
    named: dict[str, Any] = {"id": id} if id else {}
    return html.Section(children, className=kind, **named, **(aria(label=label) if label else {}))


def status_dot(status: str) -> html.Span:
    """Return a dot in the colour of an engine's status."""
    return html.Span(className=f"status {status}", **aria(hidden="true"))


def engine_link(place: PagePlace, engine: str) -> html.A:
    """Return an engine's name, which leads to its timeline."""
    return html.A(engine, href=place.to("engine", engine=engine), className="name")


def hidden(fields: Iterable[tuple[str, str]]) -> list[dcc.Input]:
    """Return fields of a form that it keeps from the address. Empty ones are left out."""
    return [field("hidden", name, value) for name, value in fields if value]


def tiles(figures: Iterable[tuple[str, str, str]]) -> html.Dl:
    """Return figures side by side: of each its name, its value, and a note."""
    return html.Dl(
        [html.Div([html.Dt(name), html.Dd(value), html.Dd(about, className="note")]) for name, value, about in figures],
        className="tiles",
    )


def tr(*cells: Any, key: str = "", kind: str | None = None) -> html.Tr:
    """Return a row of a table. `kind`: its class in the style sheet."""
    named: dict[str, Any] = {"key": key} if key else {}
    named |= {"className": kind} if kind is not None else {}
    return html.Tr(list(cells), **named)
