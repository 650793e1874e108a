"""The runbooks: one Markdown page for each finding code, carried by the wheel and found in a checkout.

`monitor runbook CODE` prints them, the service serves them under /docs/runbooks/. The bullets of a runbook under the
headings in ADVICE are the advice of its findings. A heading of the third level below one of these names a case in which
other bullets hold. A case that a section leaves out has its own bullets there; `A case, in detail` has those of `A
case` first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final, TypedDict, cast

from .judgement import JudgementFields

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_IN_WHEEL: Final = _PACKAGE / "runbooks"
ADVICE: Final = {"Do now": "do_now", "Change": "change", "What will not help": "wont_help"}
"""The field of a finding that the bullets under each heading fill."""
_MARKS: Final = re.compile(r"\\(`)|`|\[(.+?)\]\(.+?\)")
RUNBOOKS: Final = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "docs" / "runbooks"


def runbook_codes() -> list[str]:
    """Return the codes that have a runbook, in alphabetical order."""
    return sorted(path.stem for path in RUNBOOKS.glob("*.md"))


def runbook_text(code: str) -> str | None:
    """Return the runbook of `code` as Markdown, or None if there is none."""
    # Only a name from the folder is opened, so that no code can lead out of it.
    return (RUNBOOKS / f"{code}.md").read_text(encoding="utf-8") if code in runbook_codes() else None


class Advice(TypedDict):
    """What to do about a finding, one sentence or two each."""

    do_now: tuple[str, ...]
    change: tuple[str, ...]
    wont_help: tuple[str, ...]


def runbook_advice(runbook: str, case: str = "", numbers: Mapping[str, object] | None = None) -> Advice:
    """Return the advice of a runbook, which is that of a code or Markdown. `numbers` has what is known of the
    engine at hand, by the phrase that it replaces. Raises KeyError if the runbook does not have the case or a phrase.
    """
    bullets = _bullets(runbook)
    headings = (case, case.rpartition(", ")[0], "")
    if case and all(heading != case for _, heading in bullets):
        raise KeyError(case)
    found = {
        field: next((bullets[section, heading] for heading in headings if (section, heading) in bullets), ())
        for section, field in ADVICE.items()
    }
    if numbers:
        for phrase in numbers:
            if not any(phrase in text for texts in found.values() for text in texts):
                raise KeyError(phrase)
        phrases = re.compile("|".join(map(re.escape, numbers)))  # in one pass: a value is a client's text
        found = {
            field: tuple(phrases.sub(lambda match: str(numbers[match[0]]), text) for text in texts)
            for field, texts in found.items()
        }
    return Advice(do_now=found["do_now"], change=found["change"], wont_help=found["wont_help"])


@cache
def _bullets(runbook: str) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the bullets below each heading of the second level and of the third, as plain text."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    section = case = ""
    for part in re.split(r"^#(?=##? )", runbook_text(runbook) or runbook, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        level, _, name = heading.partition(" ")
        section, case = (name, "") if level == "#" else (section, name)
        bullets = re.findall(r"^- (.+(?:\n  .+)*)", body, re.MULTILINE)
        found[section, case] = tuple(_plain(" ".join(bullet.split())) for bullet in bullets)
    return found


def _plain(markdown: str) -> str:
    return _MARKS.sub(lambda mark: mark[1] or mark[2] or "", markdown)


class CaseOfAdvice(TypedDict, total=False):
    """Which advice of its runbook a finding takes."""

    case: str
    numbers: Mapping[str, object]


class FindingFields(JudgementFields, CaseOfAdvice, total=False):
    """The fields of a finding, and which advice of its runbook it takes."""


def with_advice(runbook: str | Traversable, fields: FindingFields) -> JudgementFields:
    """Return the fields of a judgement with the runbook's advice, unless they have their own."""
    text = runbook if isinstance(runbook, str) else runbook.read_text(encoding="utf-8")
    advice = runbook_advice(text, fields.pop("case", ""), fields.pop("numbers", None))
    return cast(JudgementFields, {**advice, **fields})
