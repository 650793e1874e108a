"""How a line gets to a terminal: 80 columns, good in black and white."""

from __future__ import annotations

import textwrap
from typing import Final

from rich.console import Console
from rich.text import Text

WIDTH: Final = 80


def wrapped(console: Console, text: str, lead: str, style: str = "") -> None:
    """A paragraph that hangs under its first word, with `lead` before that."""
    lines = textwrap.wrap(text, WIDTH - len(lead), break_long_words=False, break_on_hyphens=False) or [""]
    for index, line in enumerate(lines):
        put_line(console, (lead if index == 0 else " " * len(lead)) + line, style)


def put_line(console: Console, text: str, style: str = "") -> None:
    """One line, as it is."""
    console.print(Text(text, style=style), soft_wrap=True)


def clock(stamp: str | None, precise: bool = False) -> str:
    """The clock part of an RFC 3339 stamp."""
    if not stamp:
        return "?"
    return stamp[11:23] if precise else stamp[11:19]
