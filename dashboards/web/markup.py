"""What several sections are made with.

Sections are trees of Dash's HTML components that assets/kvscope.js renders: Dash itself would throw the old elements
away at each update, and with them focus, selection and what was unfolded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dash import html

from dashboards.web.links import to_block
from dashboards.web.words import spans


def aria(**names: str) -> dict[str, Any]:
    """Attributes `aria-…`, which are no Python names."""
    return {f"aria-{name}": value for name, value in names.items()}


def dot(family: str) -> html.Span:
    """A dot in the colour of a block state; a class of the style sheet."""
    return html.Span(className=f"dot {family}", **aria(hidden="true"))


def block_links(engine: str, blocks: Sequence[int], most: int) -> list[Any]:
    """Block ids as links, an unbroken run of them as one; at most so many, and how many more there are."""
    runs = spans(blocks)
    links: list[Any] = [
        html.A(f"{first}" if first == last else f"{first}–{last}", href=to_block(engine, first), className="id")
        for first, last in runs[:most]
    ]
    return links + and_more(len(runs) - most)


def and_more(count: int) -> list[Any]:
    """`and 12 more`, if there are."""
    return [html.Span(f"and {count:,} more", className="rest")] if count > 0 else []
