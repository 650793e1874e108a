"""The streams folded to all engines, their state and their findings: what a hub shows, and what a takeover needs.

What counts is decided by who sent it and where the stream has it. Of an engine, the owner's latest point counts
(fleet_owners.py). Of a finding, the latest transition counts that an agent sent while it owned the engine, until the
owner's points list the finding no more. What other agents send is kept, and counts once they own the engine. The order
of messages is the stream's: no time that an agent wrote is compared with another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ..base import limits
from ..base.errors import ContractError
from ..base.latest_entries import LatestEntries
from ..detectors.findings import Finding, FindingReport, Place
from ..detectors.registry import catalogue
from ..outputs.alerting.message import message_id
from .agent_clocks import AgentClocks
from .bus_connection import StreamMessage
from .bus_messages import (
    MAX_LISTED_IDS,
    AnnotationMessage,
    BusMessage,
    FindingMessage,
    PointMessage,
    at_receipt,
    decode_message,
    engine_named_by,
)
from .bus_subjects import names_of, subject_token
from .fleet_owners import EngineOwner, FleetOwners

MAX_UNREADABLE: Final = 20
MAX_ANNOTATIONS: Final = 1_000
UNLISTED_S: Final = 10.0
"""Two points. A finding that is older, and that its engine's point does not list, is over: points and transitions come
by two streams, and neither waits for the other.
"""


class FleetEngine(msgspec.Struct, frozen=True):
    """An engine as its agent last described it. `missing` are ids of open findings whose transition is not here."""

    point: PointMessage
    findings: list[FindingReport]
    missing: list[str]


class ToldFinding(NamedTuple):
    """A transition of a finding, and its place in the stream. stored_s: wall time by the server's clock. arrived_s: by
    this machine's monotonic clock.
    """

    message: FindingMessage
    sequence: int
    stored_s: float
    arrived_s: float

    @property
    def is_firing(self) -> bool:
        """Whether the finding fires by it."""
        return self.message.transition.to == "firing"


_Key = tuple[str, str, str]
"""The key of a transition: its engine, its agent while it does not count (else empty), and its finding's id."""


class _AgentShare(NamedTuple):
    """The keys of the transitions that are kept of one agent, the oldest first."""

    firing: OrderedDict[_Key, None]
    resolved: OrderedDict[_Key, None]

    @property
    def size(self) -> int:
        return len(self.firing) + len(self.resolved)


class FleetFold:
    """Engines, findings and annotations of one tenant. One thread at a time.

    Beyond `most_findings` the agent that sent the most loses its oldest ones, the resolved first.
    """

    def __init__(self, owners: FleetOwners | None = None, most_findings: int = limits.BUS_FINDINGS) -> None:
        self.owners = owners or FleetOwners()
        self.clocks = AgentClocks()
        self.points: dict[str, PointMessage] = {}
        """Each engine as its owner described it last, or its last owner until the new one does."""
        self.annotations: LatestEntries[str, AnnotationMessage] = LatestEntries(MAX_ANNOTATIONS)
        """Those of owners, in the order of the stream."""
        self.unreadable: LatestEntries[str, int] = LatestEntries(MAX_UNREADABLE)
        """Why messages were unreadable, and how many of each kind. Only the latest reasons remain."""
        self.unreadable_total = 0
        self.findings_version = 0
        """Changes with each transition, and with each change of what counts."""
        self._described: dict[str, tuple[int, float]] = {}
        """The sequence of each engine's point, and when it arrived (monotonic s)."""
        self._told: dict[str, dict[tuple[str, str], ToldFinding]] = {}
        """By engine, and by agent and finding. The latest that counts of a finding has no agent in its key."""
        self._over: dict[str, dict[str, ToldFinding]] = {}
        """By engine and finding: the ends of findings that the owner's points list no more."""
        self._shares: dict[str, _AgentShare] = {}
        self._most_findings = most_findings
        self._kept = 0
        self._released: list[ToldFinding] = []

    # ---------------------------------------------------------------- what is received

    def take(self, received: StreamMessage) -> BusMessage | None:
        """Fold in a message. Return None for an unreadable one, after counting it with its reason, and for one that
        does not count.
        """
        names = names_of(received.subject)
        try:
            message = decode_message(names.kind, received.body)
            if subject_token(message.agent) != names.agent or subject_token(engine_named_by(message)) != names.engine:
                raise ContractError(f"a {names.kind} that names another agent or engine than its subject")
        except ContractError as error:
            self.unreadable_total += 1
            self.unreadable[str(error)] = self.unreadable.get(str(error), 0) + 1
            return None
        self.clocks.take(message, received)
        message = at_receipt(message, round(received.stored_s * 1e9))
        if isinstance(message, FindingMessage):
            return message if self._take_finding(message, received) else None
        engine, late = engine_named_by(message), received.is_backlog
        if isinstance(message, PointMessage):
            counts = self.owners.describe(engine, message.agent, received.arrived_s(), is_backlog=late)
            return message if counts and self._take_point(message, received) else None
        if not self.owners.tell(engine, message.agent, received.arrived_s(), is_backlog=late):
            return None
        self.annotations[message.id] = message
        return message

    def take_lease(self, key: str, agent: str, engines: list[str], now_s: float) -> None:
        """Take a lease: the engines found there belong to its holder."""
        for engine in self.owners.take_lease(key, agent, engines, now_s):
            self._count(engine)

    def take_owner(self, record: EngineOwner, now_s: float) -> None:
        """Take the owner of an engine as the tenant's hubs know it."""
        self.owners.take_record(record, now_s)
        self._count(record.engine)

    def take_released(self) -> list[ToldFinding]:
        """Return transitions that came earlier, or never, and count from now on. Each call returns new ones."""
        released, self._released = self._released, []
        return released

    def _take_point(self, message: PointMessage, received: StreamMessage) -> bool:
        engine = message.engine.engine
        before = self.points.get(engine)
        if before is not None and self._described[engine][0] >= received.sequence:
            return False
        self.points[engine] = message
        self._described[engine] = received.sequence, received.arrived_s()
        if before is None or (before.agent, before.open) != (message.agent, message.open):
            self._count(engine)
        self._end_unlisted(engine, message)
        for gone in self.owners.take_dropped():
            self.points.pop(gone, None)
            self._described.pop(gone, None)
        return True

    def _take_finding(self, message: FindingMessage, received: StreamMessage) -> bool:
        engine, agent, id = engine_named_by(message), message.agent, message.transition.id
        told = ToldFinding(message, received.sequence, received.stored_s, received.arrived_s())
        counts = self.owners.tell(engine, agent, told.arrived_s, is_backlog=received.is_backlog)
        counts = counts or self._is_adopted(engine, told)
        before = self._told.get(engine, {}).get(("" if counts else agent, id))
        if before is not None and before.sequence >= received.sequence:
            return False
        self._keep((engine, "" if counts else agent, id), told)
        return counts

    def _keep(self, key: _Key, told: ToldFinding) -> None:
        self._forget(key)
        self.findings_version += 1
        share = self._shares.setdefault(told.message.agent, _AgentShare(OrderedDict(), OrderedDict()))
        (share.firing if told.is_firing else share.resolved)[key] = None
        self._told.setdefault(key[0], {})[key[1:]] = told
        self._kept += 1
        while self._kept > self._most_findings:
            most = max(self._shares.values(), key=lambda each: each.size)
            self._forget(next(iter(most.resolved or most.firing)))

    def _forget(self, key: _Key) -> None:
        engine, _, id = key
        told = self._told.get(engine, {}).pop(key[1:], None)
        if told is None:
            return
        self._kept -= 1
        share = self._shares[told.message.agent]
        (share.firing if told.is_firing else share.resolved).pop(key)
        if not share.size:
            del self._shares[told.message.agent]
        if not key[1]:
            self._over.get(engine, {}).pop(id, None)
        if not self._told[engine]:
            del self._told[engine]

    # ---------------------------------------------------------------- what counts

    def _count(self, engine: str) -> None:
        """Count what an engine's owner sent before it was known to own the engine, and what it goes on with."""
        self.findings_version += 1
        for (agent, id), told in list(self._told.get(engine, {}).items()):
            if agent and (self.owners.owns(engine, agent) or self._is_adopted(engine, told)):
                self._forget((engine, agent, id))
                before = self._told.get(engine, {}).get(("", id))
                if before is None or before.sequence < told.sequence:
                    self._keep((engine, "", id), told)
                    self._released.append(told)

    def _is_adopted(self, engine: str, told: ToldFinding) -> bool:
        """Whether it is the first that an earlier owner sent of a finding, and the owner says that this goes on."""
        point, id = self.points.get(engine), told.message.transition.id
        if point is None or not told.is_firing or ("", id) in self._told.get(engine, {}):
            return False
        is_listed = id in point.open or len(point.open) >= MAX_LISTED_IDS
        return is_listed and self.owners.owns(engine, point.agent) and self.owners.owned(engine, told.message.agent)

    def _end_unlisted(self, engine: str, point: PointMessage) -> None:
        """End what the owner of an engine does not list any more: its transition was lost, or is not to come."""
        if len(point.open) >= MAX_LISTED_IDS:
            return
        over = self._over.setdefault(engine, {})
        listed = set(point.open)
        for id in over.keys() & listed:
            del over[id]
            self.findings_version += 1
        for id, told in self._standing(engine).items():
            if told.is_firing and id not in listed and self.arrived_s(engine) - told.arrived_s > UNLISTED_S:
                ended = msgspec.structs.replace(
                    told.message.transition, to="resolved", at_ns=point.at_ns, resolved_ns=point.at_ns
                )
                message = FindingMessage(
                    id=message_id(id, "resolved", point.at_ns), agent=point.agent, transition=ended
                )
                over[id] = told._replace(message=message)
                self._released.append(over[id])
                self.findings_version += 1
        if not over:
            del self._over[engine]

    def _standing(self, engine: str) -> dict[str, ToldFinding]:
        """Return the transition that counts of each finding of an engine, by id. Earlier owners' findings that were
        over before this reader began are among them.
        """
        standing: dict[str, ToldFinding] = {}
        for (agent, id), told in self._told.get(engine, {}).items():
            if not agent:
                end = self._over.get(engine, {}).get(id)
                standing[id] = end if end is not None and end.sequence >= told.sequence else told
            elif not told.is_firing and self.owners.owned(engine, agent):
                standing.setdefault(id, told)
        return standing

    def _standing_of(self, engine: str) -> Iterator[tuple[str, ToldFinding]]:
        for name in [engine] if engine else list(self._told):
            yield from self._standing(name).items()

    # ---------------------------------------------------------------- what is known

    def arrived_s(self, engine: str) -> float:
        """Return when the point of an engine arrived (monotonic s), -inf if none did."""
        return self._described[engine][1] if engine in self._described else float("-inf")

    def open_findings(self, engine: str = "") -> list[Finding]:
        """Return the firing findings of one engine or of all, without those whose code this release lacks. Each call
        makes new ones.
        """
        latest: dict[Place, Finding] = {}
        firing = [told for _, told in self._standing_of(engine) if told.is_firing]
        for told in sorted(firing, key=lambda each: each.sequence):
            judged = told.message.transition.judgement
            if judged.code in catalogue():
                # Two ids of one place: an agent without a memory reported again what it could not read here.
                latest[judged.engine, judged.code, judged.key] = told.message.transition.finding()
        return list(latest.values())

    def replaced_findings(self, engine: str) -> list[Finding]:
        """Return the firing findings of an engine at whose place a later one fires."""
        latest = {finding.id for finding in self.open_findings(engine)}
        return [
            told.message.transition.finding()
            for id, told in self._standing_of(engine)
            if told.is_firing and told.message.transition.judgement.code in catalogue() and id not in latest
        ]

    def open_ids(self, engine: str = "") -> set[str]:
        """Return the ids of all findings that fire, known codes or not."""
        return {id for id, told in self._standing_of(engine) if told.is_firing}

    def finding(self, id: str) -> Finding | None:
        """Return the finding of an id, open or over, or None if it is not known."""
        found = (told for each, told in self._standing_of("") if each == id)
        told = next(found, None)
        if told is None or told.message.transition.judgement.code not in catalogue():
            return None
        return told.message.transition.finding()

    def resolved_findings(self) -> list[Finding]:
        """Return the findings that are over, the latest last."""
        over = [told for _, told in self._standing_of("") if not told.is_firing]
        return [
            told.message.transition.finding()
            for told in sorted(over, key=lambda each: each.sequence)
            if told.message.transition.judgement.code in catalogue()
        ]

    def engines(self) -> dict[str, FleetEngine]:
        """Return every engine by name, with the findings that fire on it."""
        by_engine: dict[str, list[FindingReport]] = {}
        for finding in self.open_findings():
            by_engine.setdefault(finding.judgement.engine, []).append(finding.report())
        return {
            name: FleetEngine(
                point, by_engine.get(name, []), [each for each in point.open if each not in self._standing(name)]
            )
            for name, point in sorted(self.points.items())
        }
