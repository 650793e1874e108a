"""The message of one transition, whatever its receiver."""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from kvscope.monitor.detectors.judgement import Severity, Verdict
from kvscope.monitor.findings import FindingReport, FindingState

MessageKind = Literal["firing", "resolved", "test"]

MOST_REQUESTS: Final = 20
MAX_MESSAGE_LINES: Final = 5
LONGEST_ID: Final = 100
LONGEST_TEXT: Final = 1_500
LONGEST_LINE: Final = 300
"""All of these keep a message below the 20 kB that the Standard Webhooks specification asks for."""


class MessageCulprits(msgspec.Struct, frozen=True):
    """The requests of the finding: the first ids, and how many there are."""

    requests: list[str]
    requests_in_all: int
    blocks_in_all: int


class AlertedFinding(msgspec.Struct, frozen=True):
    """A finding in a notification. `id` is the alert's: the same from its first message to its last."""

    id: str
    code: str
    title: str
    severity: Severity
    verdict: Verdict
    state: FindingState
    engine: str
    key: str
    since: str | None
    resolved_at: str | None
    culprits: MessageCulprits
    explanation: str
    effects: list[str]
    """Codes of its effects, which its notification covers."""
    do_now: list[str]
    runbook: str


class Message(msgspec.Struct, frozen=True):
    """One message. `at` is RFC 3339. `firing` are all codes that fire on the engine, including this one.

    `repeat` counts the earlier reminders that this still fires. `flapping`: it fired and resolved so often that
    notifications pause until it has been quiet for a while.
    """

    id: str
    kind: MessageKind
    at: str
    finding: AlertedFinding = msgspec.field(name="trouble")
    firing: list[str] = []
    repeat: int = 0
    flapping: bool = False

    @property
    def trouble(self) -> AlertedFinding:
        """The finding under its old name, which plug-ins may use for one more release."""
        return self.finding


def alerted_finding(report: FindingReport, alert: str, key: str, to: Literal["firing", "resolved"]) -> AlertedFinding:
    """Return a finding as its alert reports it, cut to a size that every receiver takes. Its state is what the
    transition brought it `to`, whatever came after.
    """
    requests = [_cut_message(name, LONGEST_ID) for name in report.culprits.requests[:MOST_REQUESTS]]
    return AlertedFinding(
        id=alert,
        code=report.code,
        title=report.title,
        severity=report.severity,
        verdict=report.verdict,
        state=to,
        engine=report.engine,
        key=_cut_message(key, LONGEST_ID),
        since=report.since,
        resolved_at=report.resolved_at if to == "resolved" else None,
        culprits=MessageCulprits(requests, len(report.culprits.requests), len(report.culprits.blocks)),
        explanation=_cut_message(report.explanation, LONGEST_TEXT),
        effects=[effect.code for effect in report.effects],
        do_now=[_cut_message(line, LONGEST_LINE) for line in report.do_now[:MAX_MESSAGE_LINES]],
        runbook=report.runbook,
    )


def message_id(finding: str, to: str, at_ns: int) -> str:
    """Return an id that is the same for all deliveries of a transition and differs from all others."""
    return f"msg_{hashlib.blake2b(f'{finding} {to} {at_ns}'.encode(), digest_size=12).hexdigest()}"


def _cut_message(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
