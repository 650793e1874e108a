"""The streams folded to all engines, their state and their findings: what a hub shows, and what a takeover needs.

The fold is idempotent and does not depend on the order of messages: of an engine the newest point counts, of a finding
the newest transition.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from kvscope.monitor.bus.bus_messages import (
    AnnotationMessage,
    BusMessage,
    FindingMessage,
    PointMessage,
    decode_message,
)
from kvscope.monitor.detectors.registry import catalogue
from kvscope.monitor.errors import ContractError
from kvscope.monitor.events import limits
from kvscope.monitor.findings import Finding, FindingReport, Place

MAX_UNREADABLE: Final = 20
MAX_ANNOTATIONS: Final = 1_000


class FleetEngine(msgspec.Struct, frozen=True):
    """An engine as its agent last described it. `missing` are ids of open findings whose transition is not here."""

    point: PointMessage
    findings: list[FindingReport]
    missing: list[str]


class FleetFold:
    """Engines, findings and annotations of one tenant. One thread at a time."""

    def __init__(self, most_findings: int = limits.BUS_FINDINGS) -> None:
        self.points: dict[str, PointMessage] = {}
        self.annotations: OrderedDict[str, AnnotationMessage] = OrderedDict()
        self.unreadable: OrderedDict[str, int] = OrderedDict()
        """Why messages were unreadable, and how many of each kind. Only the latest reasons remain."""
        self.unreadable_total = 0
        self.findings_version = 0
        """Changes with each transition that counts."""
        self._open: dict[str, FindingMessage] = {}
        self._resolved: OrderedDict[str, FindingMessage] = OrderedDict()
        self._most_findings = most_findings

    def take(self, kind: str, payload: bytes) -> BusMessage | None:
        """Fold in the message in `payload`. Return None for an unreadable one, after counting it with its reason."""
        try:
            message = decode_message(kind, payload)
        except ContractError as error:
            self.unreadable_total += 1
            self.unreadable[str(error)] = self.unreadable.pop(str(error), 0) + 1
            while len(self.unreadable) > MAX_UNREADABLE:
                self.unreadable.popitem(last=False)
            return None
        self.apply(message)
        return message

    def apply(self, message: BusMessage) -> None:
        """Fold in a message."""
        if isinstance(message, FindingMessage):
            self._apply_finding(message)
        elif isinstance(message, PointMessage):
            before = self.points.get(message.engine.engine)
            if before is None or message.at_ns >= before.at_ns:
                self.points[message.engine.engine] = message
        else:
            self.annotations[message.id] = message
            while len(self.annotations) > MAX_ANNOTATIONS:
                self.annotations.popitem(last=False)

    def _apply_finding(self, message: FindingMessage) -> None:
        transition = message.transition
        before = self._open.get(transition.id) or self._resolved.get(transition.id)
        if before is not None and (before.transition.at_ns, before.transition.to) >= (transition.at_ns, transition.to):
            return
        self.findings_version += 1
        self._open.pop(transition.id, None)
        self._resolved.pop(transition.id, None)
        (self._open if transition.to == "firing" else self._resolved)[transition.id] = message
        while self._resolved and len(self._open) + len(self._resolved) > self._most_findings:
            self._resolved.popitem(last=False)

    def open_findings(self, engine: str = "") -> list[Finding]:
        """Return the firing findings of one engine or of all, without those whose code this release lacks. Each call
        makes new ones.
        """
        latest: dict[Place, Finding] = {}
        for message in sorted(self._open.values(), key=lambda each: each.transition.at_ns):
            judged = message.transition.judgement
            if engine in ("", judged.engine) and judged.code in catalogue():
                # Two ids of one place: an agent without a memory reported again what it could not read here.
                latest[judged.engine, judged.code, judged.key] = message.transition.finding()
        return list(latest.values())

    def replaced_findings(self, engine: str) -> list[Finding]:
        """Return the firing findings of an engine at whose place a later one fires."""
        latest = {finding.id for finding in self.open_findings(engine)}
        return [
            message.transition.finding()
            for message in self._open.values()
            if message.transition.judgement.engine == engine
            and message.transition.judgement.code in catalogue()
            and message.transition.id not in latest
        ]

    def open_ids(self, engine: str = "") -> set[str]:
        """Return the ids of all findings that fire, known codes or not."""
        return {
            message.transition.id
            for message in self._open.values()
            if engine in ("", message.transition.judgement.engine)
        }

    def finding(self, id: str) -> Finding | None:
        """Return the finding of an id, open or over, or None if it is not known."""
        message = self._open.get(id) or self._resolved.get(id)
        if message is None or message.transition.judgement.code not in catalogue():
            return None
        return message.transition.finding()

    def resolved_findings(self) -> list[Finding]:
        """Return the findings that are over, the latest last."""
        return [
            message.transition.finding()
            for message in self._resolved.values()
            if message.transition.judgement.code in catalogue()
        ]

    def engines(self) -> dict[str, FleetEngine]:
        """Return every engine by name, with the findings that fire on it."""
        by_engine: dict[str, list[FindingReport]] = {}
        for finding in self.open_findings():
            by_engine.setdefault(finding.judgement.engine, []).append(finding.report())
        known = self.open_ids() | self._resolved.keys()
        return {
            name: FleetEngine(point, by_engine.get(name, []), [each for each in point.open if each not in known])
            for name, point in sorted(self.points.items())
        }
