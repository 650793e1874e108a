"""What becomes of each line that an engine logs about KV memory: it is read, or ignored for a reason (log_lines.toml).

A line that is in neither is unknown, as one of a later release, and a report gives its number.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache, cached_property
from pathlib import Path
from typing import Final

import msgspec

LINES_FILE: Final = Path(__file__).with_name("log_lines.toml")


class _Ignored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    because: str
    lines: list[str]

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """Any of the lines. A `*` stands for at most 300 characters of it."""
        return re.compile("|".join(re.escape(line).replace(r"\*", ".{0,300}?") for line in self.lines))


class LineTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table: the codes by class of lines (kvscope.monitor.sources.log_patterns), and groups of ignored lines."""

    read: dict[str, list[str]]
    ignored: list[_Ignored]

    def reason(self, text: str) -> str:
        """Return why a line is ignored, or an empty text if no group has it."""
        return next((group.because for group in self.ignored if group.expression.search(text)), "")


@cache
def line_table() -> LineTable:
    """Return the table of the package."""
    return msgspec.convert(tomllib.loads(LINES_FILE.read_text(encoding="utf-8")), LineTable)
