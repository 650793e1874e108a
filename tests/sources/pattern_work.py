"""How much a regular expression may try from one place of a text: a bound that its parts give, not a time.

A search is linear in the text if every place costs a bounded number of tries. A repetition without an end costs the
whole rest of the text from each place; two repetitions in a row cost their product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

_parser: Final[Any] = re._parser  # type: ignore[attr-defined]
FEW: Final = 8
"""Repetitions of no more choices than this are not counted: optional words and short runs of spaces."""

_Item = tuple[float, int]
"""The tries that a part costs, and how many characters it takes at least."""


def tries_from_one_place(expression: re.Pattern[str]) -> float:
    """Return an upper bound on the ways in which its repetitions may share the text behind one place."""
    return _tries(_items(_parser.parse(expression.pattern, expression.flags)))


def _tries(items: Sequence[_Item]) -> float:
    """Multiply repetitions. What must stand between two of them leaves the first only some of its choices."""
    total, before, between = 1.0, 1.0, 0
    for tries, width in items:
        if tries <= FEW:
            between += width
            continue
        total *= max(1.0, before / max(1, between))
        before, between = tries, width
    return total * before


def _items(parsed: Any) -> list[_Item]:
    return [item for operator, argument in parsed for item in _items_of(str(operator), argument)]


def _items_of(operator: str, argument: Any) -> Iterator[_Item]:
    if operator == "SUBPATTERN":
        yield from _items(argument[-1])
    elif operator == "BRANCH":
        branches = [_items(branch) for branch in argument[1]]
        tries = [_tries(branch) for branch in branches]
        yield sum(each for each in tries if each > FEW) or 1.0, min(sum(w for _, w in branch) for branch in branches)
    elif operator in ("MAX_REPEAT", "MIN_REPEAT"):
        least, most, inner = argument
        items = _items(inner)
        choices = math.inf if most == _parser.MAXREPEAT else most - least + 1
        yield max(1.0, choices) * _tries(items), least * sum(width for _, width in items)
    elif operator == "POSSESSIVE_REPEAT":  # it gives nothing back, but reads the text from each place anew
        least, most, inner = argument
        items = _items(inner)
        yield math.inf if most == _parser.MAXREPEAT else 1.0, least * sum(width for _, width in items)
    elif operator in ("ASSERT", "ASSERT_NOT"):
        yield _tries(_items(argument[1])), 0
    elif operator == "ATOMIC_GROUP":
        yield from _items(argument)
    else:
        yield 1.0, 0 if operator == "AT" else 1
