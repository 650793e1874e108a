"""Finds in a report what people say about an engine, by the concept that each phrase names (report_phrases.toml).

A phrase is one observation, not a cause. Which causes a set of them suggests is for
kvscope.monitor.detectors.hypotheses to weigh. A phrase that the sentence denies ("no preemptions") is left out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from .pasted_lines import PastedLine

MOST_PROSE: Final = 100_000
"""Characters: no real report is longer."""
MOST_QUOTED_WORDS: Final = 90

PHRASES_FILE: Final = Path(__file__).with_name("report_phrases.toml")


def _bounded(phrase: str) -> str:
    """Let a phrase read no more than 40 letters of a word and 9 digits of a number, and give none of them back.

    Otherwise a line that is one long word costs its length from each of its places, times that of what follows.
    """
    return re.sub(r"\\(w|d)([*+])", _bounded_run, phrase)


def _bounded_run(match: re.Match[str]) -> str:
    return rf"\{match[1]}{{{0 if match[2] == '*' else 1},{40 if match[1] == 'w' else 9}}}+"


@cache
def phrase_expressions() -> dict[str, re.Pattern[str]]:
    """Return the compiled phrases by concept. They take 30 ms to compile, so only a report in prose compiles them.

    ASCII: English words stand in Chinese sentences without a space, and only then is that a word boundary.
    """
    file = tomllib.loads(PHRASES_FILE.read_text(encoding="utf-8"))
    found = {}
    for concept, alternatives in file["phrases"].items():
        text = re.sub(r"\{([A-Z]+)\}", lambda part: file["parts"][part[1]], "|".join(map("".join, alternatives)))
        found[concept] = re.compile(_bounded(text), re.IGNORECASE | re.ASCII)
    return found


_DENIED: Final = re.compile(
    r"(?:\b(?:no|not|without|isn't|aren't|wasn't|don't|doesn't|did not|does not|neither"
    r"|nor)\b(?:\W+\w+){0,2}\W{1,3}|没有|不是|并非|无)$",
    re.IGNORECASE,
)
_DENIES_ITSELF: Final = (
    "stuck",
    "waits_unserved",
    "not_freed",
    "unanswered",
    "zero_tokens",
    "prefix_misses",
    "skipped_free",
    "tier_misses",
    "not_stored",
    "memory_left_behind",
    "host_memory_grows",
    "transfer_lost",
)
"""Concepts some of whose phrases contain the denial."""
_HAS_DENIAL: Final = re.compile(
    r"\b(?:not?|never|nothing|nobody|none|without|zero|unable|cannot)\b|n't\b|不|没有|未|无", re.IGNORECASE
)
_DENIED_RIGHT_BEFORE: Final = re.compile(
    r"\b(?:no|not|never|without|isn't|aren't|wasn't|don't|doesn't|didn't)(?: (?:an?|any|the))?"
    r"(?: (?!(?:and|but|or|only|just|to|it)\b)\w+)? $",
    re.IGNORECASE,
)
"""A denial of the next word, or of the one after an adjective: "this is not a resource leak"."""
_COMPLETED: Final = ("transfer_done",)
"""Concepts that something ended. "Before", "until" and "if" say that it had not."""
_SUPPOSABLE: Final = ("out_of_memory", "no_room_for_pool")
"""Concepts that an explanation names as what may happen."""
_SUPPOSED: Final = re.compile(r"\b(?:if (?:you|your|this|it)|might|may|could|would|when you)\b[^.!?]*$", re.IGNORECASE)
_NOT_YET: Final = re.compile(r"\b(?:before|until|unless|if)\b(?:\W+\w+){0,2}\W{1,3}$", re.IGNORECASE)
_UNLIKELY: Final = re.compile(r"\W{1,9}(?:less|more|un) ?likely", re.IGNORECASE)
_SAYS_WHEN: Final = re.compile(r"(?:after|each|every|even|when|while)\b", re.IGNORECASE)
"""What a phrase with such a beginning tells is not denied: "not released after a request completes"."""
_NEGATED: Final = re.compile(r"\b(?:not|no|without)\b|n't\b", re.IGNORECASE)
_CODE_LINE: Final = re.compile(
    r"^\s*(?:File \"|raise |return |import |from \w+ import|def |class |at \w|\w+\(|\^+|--[a-z]"
    r"|(?:export )?[A-Z][A-Z0-9_]{3,60}=)"
)


class StatedPhrase(NamedTuple):
    """A concept, the line from 1 on that names it, and the words."""

    line: int
    concept: str
    quote: str


def stated_phrases(lines: Iterable[PastedLine]) -> list[StatedPhrase]:
    """Each concept that the prose among the lines names, where it does so first."""
    found: dict[str, StatedPhrase] = {}
    for starts, text in _paragraphs(lines):
        for concept, expression in phrase_expressions().items():
            if concept in found:
                continue
            for match in expression.finditer(text):
                denied = (
                    _is_denied_at_once(text, match) if concept in _DENIES_ITSELF else _is_denied(concept, text, match)
                )
                if not denied and not (concept in _SUPPOSABLE and _is_supposed(text, match)):
                    line = next(number for offset, number in reversed(starts) if offset <= match.start())
                    found[concept] = StatedPhrase(line, concept, " ".join(match[0].split())[:MOST_QUOTED_WORDS])
                    break
    return list(found.values())


def _is_denied(concept: str, text: str, match: re.Match[str]) -> bool:
    before = text[max(0, match.start() - 40) : match.start()]
    if _NEGATED.search(match[0]) is not None or (_DENIED.search(before) and not _SAYS_WHEN.match(match[0])):
        return True
    return concept in _COMPLETED and _NOT_YET.search(before) is not None


def _is_denied_at_once(text: str, match: re.Match[str]) -> bool:
    """Whether the words right before a phrase without a denial of its own deny it."""
    before = text[max(0, match.start() - 40) : match.start()]
    return _HAS_DENIAL.search(match[0]) is None and _DENIED_RIGHT_BEFORE.search(before) is not None


def _is_supposed(text: str, match: re.Match[str]) -> bool:
    """Whether the sentence names what may happen, and not what did."""
    before = text[max(0, match.start() - 120) : match.start()]
    return _SUPPOSED.search(before) is not None or _UNLIKELY.match(text, match.end()) is not None


def _paragraphs(lines: Iterable[PastedLine]) -> Iterator[tuple[list[tuple[int, int]], str]]:
    """Yield runs of lines of prose as one text each, with where in it each line begins."""
    starts: list[tuple[int, int]] = []
    text, last, total = "", 0, 0
    for line in lines:
        if line.is_record or _CODE_LINE.match(line.text):
            continue
        total += len(line.text)
        if total > MOST_PROSE:
            break
        if text and (line.number != last + 1 or len(text) > 4_000):
            yield starts, text
            starts, text = [], ""
        starts.append((len(text), line.number))
        text += line.text.strip() + " "
        last = line.number
    if text:
        yield starts, text
