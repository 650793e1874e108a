"""Findings of one engine that advise opposite values of one setting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import Final, NamedTuple

from kvscope.monitor.detectors.findings import FindingReport

DIRECTIONS: Final = {
    **dict.fromkeys(("raise", "higher", "increase", "larger", "enlarge", "above", "longer"), 1),
    **dict.fromkeys(("lower", "reduce", "smaller", "decrease", "fewer", "shorter", "below", "remove", "without"), -1),
}
_SETTING: Final = re.compile(r"(--[a-z][a-z-]+)(?:\s+(?:to\s+)?(\d+(?:[,.]\d+)*))?")


class AdvisedValue(NamedTuple):
    """What a finding advises for a setting: to raise it (1), to lower it (-1), or to give it this value (0)."""

    code: str
    setting: str
    direction: int
    value: str
    sentence: str

    def contradicts(self, other: AdvisedValue) -> bool:
        """Whether one engine cannot follow both."""
        if self.setting != other.setting or self.code == other.code:
            return False
        two_values = not self.direction and not other.direction and self.value and other.value
        return self.direction * other.direction < 0 or bool(two_values and self.value != other.value)


def advised_values(finding: FindingReport) -> Iterator[AdvisedValue]:
    """Yield what the finding advises. A sentence that begins with "If" is for another case, and flags of `monitor` set
    nothing in the engine. The last word before a flag decides the direction.
    """
    for text in (*finding.do_now, *finding.change):
        for sentence in re.split(r"(?<=[.;:])\s+", text):
            if sentence.startswith("If "):
                continue
            own = sentence.partition("monitor ")[0]
            for match in _SETTING.finditer(own):
                before = [
                    DIRECTIONS[word]
                    for word in re.findall(r"[a-z]+", own[: match.start()].lower())
                    if word in DIRECTIONS
                ]
                direction = before[-1] if before else 0
                yield AdvisedValue(finding.code, match[1], direction, match[2] or "", sentence)


def opposite_advice(findings: Iterable[FindingReport]) -> list[str]:
    """Return each contradiction between findings of one engine, in words."""
    by_engine: dict[str, list[AdvisedValue]] = {}
    for finding in findings:
        by_engine.setdefault(finding.engine, []).extend(advised_values(finding))
    return [
        f"opposite advice on {one.setting}: {one.code} ({one.sentence}) and {other.code} ({other.sentence})"
        for advised in by_engine.values()
        for one, other in combinations(advised, 2)
        if one.contradicts(other)
    ]
