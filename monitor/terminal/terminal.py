"""How a line gets to a terminal: 80 columns, good in black and white, and without characters that a terminal obeys.

Names and texts in a report come from engines and their clients. Every console of a command comes from here.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook, RenderResult
from rich.segment import Segment
from rich.text import Text

from ..base.text import escaped, escaped_lines

WIDTH: Final = 80


def terminal_console(**settings: Any) -> Console:
    """Make a console that shows control and bidirectional characters of any text as escapes."""
    console = Console(highlight=False, **settings)
    console.push_render_hook(_EscapeHook())
    return console


class _EscapeHook(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(renderables)]


class _Escaped:
    """Output laid out by rich, with its texts escaped and its own terminal codes kept."""

    def __init__(self, renderables: Iterable[ConsoleRenderable]) -> None:
        self._renderables = renderables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for renderable in self._renderables:
            for text, style, control in console.render(renderable, options):
                yield Segment(text if control else escaped_lines(text), style, control)


def wrapped(console: Console, text: str, lead: str, style: str = "") -> None:
    """Print a paragraph that hangs under its first word, with `lead` before that."""
    lines = textwrap.wrap(escaped(text), WIDTH - len(lead), break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        put_line(console, (lead if index == 0 else " " * len(lead)) + line, style)


def put_line(console: Console, text: str, style: str = "") -> None:
    """One line, however long."""
    console.print(Text(escaped(text), style=style), soft_wrap=True)


def clock(stamp: str | None, precise: bool = False) -> str:
    """Return the clock part of an RFC 3339 stamp."""
    if not stamp:
        return "?"
    return stamp[11:23] if precise else stamp[11:19]
