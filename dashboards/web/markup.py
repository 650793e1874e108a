"""The building blocks of several sections.

Sections are trees of Dash's HTML components that assets/kvscope.js renders: Dash itself would throw the old elements
away at each update, and with them focus, selection and what was unfolded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import dcc, html

from kvscope.dashboards.web.display_text import spans
from kvscope.dashboards.web.links import PagePlace, is_stream_position


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
