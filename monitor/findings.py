"""A finding's life: a fold over judgements. Pending within its grace, then firing, then resolved.

The same trouble (engine, code, key) is one finding that grows, not many. One that is not judged any more is resolved
after a moment, so that a judgement that flickers does not fire twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

import msgspec

from monitor.detectors.judgement import CATALOGUE, SEVERITIES, Evidence, Judgement, Severity, Verdict
from monitor.ledger.words import timestamp

State = Literal["pending", "firing", "resolved"]

RESOLVE_AFTER_NS: Final = 3_000_000_000
MAX_RESOLVED: Final = 1_000


class Culprits(msgspec.Struct, frozen=True):
    """Who it is about: request ids, block ids."""

    requests: list[str]
    blocks: list[int]


class FindingReport(msgspec.Struct, frozen=True):
    """A finding as every outlet shows it. Times are RFC 3339; lists are empty, never null."""

    id: str
    code: str
    title: str
    severity: Severity
    verdict: Verdict
    state: State
    engine: str
    since: str | None
    position: str
    resolved_at: str | None
    culprits: Culprits
    evidence: list[Evidence]
    explanation: str
    do_now: list[str]
    change: list[str]
    wont_help: list[str]
    missing: str
    runbook: str


class Finding:
    """One trouble of one engine, from when it was first judged to when it ended. Times are wall ns."""

    def __init__(self, judgement: Judgement, now_ns: int) -> None:
        self.judgement = judgement
        self.state: State = "pending"
        self.first_seen_ns = now_ns
        self.last_seen_ns = now_ns
        self.fired_ns = 0
        self.resolved_ns = 0

    @property
    def severity(self) -> Severity:
        """By the catalogue."""
        return CATALOGUE[self.judgement.code].severity

    @property
    def id(self) -> str:
        """The same for all of its life, and no other's."""
        judged = self.judgement
        text = f"{judged.engine}\n{judged.code}\n{judged.key}\n{self.first_seen_ns}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def report(self) -> FindingReport:
        """As outlets show it."""
        judged = self.judgement
        return FindingReport(
            id=self.id,
            code=judged.code,
            title=CATALOGUE[judged.code].title,
            severity=self.severity,
            verdict=judged.verdict,
            state=self.state,
            engine=judged.engine,
            since=timestamp(judged.since_ns),
            position=judged.position,
            resolved_at=timestamp(self.resolved_ns),
            culprits=Culprits(list(judged.requests), list(judged.blocks)),
            evidence=list(judged.evidence),
            explanation=judged.explanation,
            do_now=list(judged.do_now),
            change=list(judged.change),
            wont_help=list(judged.wont_help),
            missing=judged.missing,
            runbook=runbook(judged.code),
        )


class Transition(NamedTuple):
    """A finding has just begun to fire, or has just been resolved."""

    finding: Finding
    to: Literal["firing", "resolved"]
    at_ns: int


class Findings:
    """All findings of all engines. `update` with every engine's judgements, as often as they are made."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str, str], Finding] = {}
        self._resolved: list[Finding] = []

    def update(self, engine: str, now_ns: int, judgements: Iterable[Judgement]) -> list[Transition]:
        """Fold in all that is judged of one engine at `now_ns` (wall); what changed by it."""
        transitions = []
        for judged in judgements:
            key = (judged.engine, judged.code, judged.key)
            finding = self._open.get(key)
            if finding is None:
                finding = self._open[key] = Finding(judged, now_ns)
            finding.judgement = judged
            finding.last_seen_ns = now_ns
            if finding.state == "pending" and not judged.pending:
                finding.state = "firing"
                finding.fired_ns = now_ns
                transitions.append(Transition(finding, "firing", now_ns))
        for key, finding in list(self._open.items()):
            if key[0] == engine and now_ns - finding.last_seen_ns >= RESOLVE_AFTER_NS:
                del self._open[key]
                if finding.state == "firing":
                    finding.state = "resolved"
                    finding.resolved_ns = finding.last_seen_ns
                    self._resolved.append(finding)
                    transitions.append(Transition(finding, "resolved", now_ns))
        del self._resolved[:-MAX_RESOLVED]
        return transitions

    def firing(self) -> list[Finding]:
        """What is wrong now, the worst first."""
        return sorted((f for f in self._open.values() if f.state == "firing"), key=_worst_first)

    def pending(self) -> list[Finding]:
        """What may be about to fire."""
        return [finding for finding in self._open.values() if finding.state == "pending"]

    def resolved(self) -> list[Finding]:
        """What was wrong, the latest first."""
        return self._resolved[::-1]


def runbook(code: str) -> str:
    """The page that tells all about a code; the service serves it under the same path."""
    return f"docs/runbooks/{code}.md"


def severity_at_least(severity: Severity, bar: Severity) -> bool:
    """Whether it is as grave as `bar`, or graver."""
    return SEVERITIES.index(severity) >= SEVERITIES.index(bar)


def _worst_first(finding: Finding) -> tuple[int, int]:
    return -SEVERITIES.index(finding.severity), finding.first_seen_ns
