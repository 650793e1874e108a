"""A class of log lines: which engine writes it, in which releases it was seen, and how it is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from ...base.text import number_in

LineFields = dict[str, int | float | str]

MOST_QUOTED: Final = 160
GIB_PER_UNIT: Final = {
    "KiB": 1 / (1 << 20),
    "MiB": 1 / 1024,
    "GiB": 1.0,
    "KB": 1e3 / 2**30,
    "MB": 1e6 / 2**30,
    "GB": 1e9 / 2**30,
}


class LogPattern(NamedTuple):
    """One class. `literal` is in each of its lines, or one of several with "|" between them, and found before the
    expression is tried. Named groups become fields, unless `fields` makes them of the match.
    """

    name: str
    engine: str
    releases: str
    literal: str
    expression: str
    sample: str
    fields: Callable[[re.Match[str]], LineFields] | None = None


class MatchedLine(NamedTuple):
    """A line of that class, the numbers in it, and the part that matched."""

    name: str
    fields: LineFields
    quote: str
    start: int
    """Where in the line the part begins."""
    engine: str
    """The kind of engine that prints such lines."""


class Prefilter:
    """All classes, behind their literals: most lines have none, and few have two."""

    def __init__(self, patterns: Sequence[LogPattern]) -> None:
        self._patterns = patterns

    @cached_property
    def _compiled(self) -> list[tuple[str, LogPattern, re.Pattern[str]]]:
        return [
            (literal, one, re.compile(one.expression, re.ASCII))
            for one in self._patterns
            for literal in one.literal.split("|")
        ]

    def matches(self, text: str, joined: str, spaced: str) -> Iterator[MatchedLine]:
        """Yield the match of `text`, by itself or with the lines that continue it. A match begins in `text`."""
        whole = (text,) if joined == text else (spaced, joined, text)
        # The longest variant has every literal that another has, unless a space parts it there.
        tried = [(p, e) for literal, p, e in self._compiled if literal in spaced or literal in joined]
        for pattern, expression in dict.fromkeys(tried):
            found = [match for variant in whole if (match := _within(expression, variant, len(text)))]
            if found:
                best = max(found, key=lambda match: sum(group is not None for group in match.groups()))
                quote = " ".join(best[0].split())[:MOST_QUOTED]
                yield MatchedLine(pattern.name, _line_fields(pattern, best), quote, best.start(), pattern.engine)


def _within(expression: re.Pattern[str], text: str, limit: int) -> re.Match[str] | None:
    match = expression.search(text)
    return match if match is not None and match.start() < limit else None


def _line_fields(pattern: LogPattern, match: re.Match[str]) -> LineFields:
    if pattern.fields is not None:
        return pattern.fields(match)
    return {name: number_in(text) for name, text in match.groupdict().items() if text is not None}


def gib(amount: str, unit: str) -> float:
    """Return a size with its unit, in GiB."""
    return round(float(amount) * GIB_PER_UNIT[unit], 4)
