"""A finding's life: a fold over judgements. Pending within its grace, then firing, then resolved.

Judgements of the same problem (engine, code, key) make one finding that grows, not many. One that is not judged any
more is resolved after a moment, so that a judgement that flickers does not fire twice. One that fires again within
RETURNS_S of its end, in the same process, is the same finding with another interval.

A finding that another one explains (`explains` in registry.py) is suppressed: its root cause lists it, and it
does not fire. A finding that fired before its cause did is resolved for its receivers. When the cause has ended and the
effect goes on nevertheless, it fires.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from ..base.text import timestamp
from .detector import Detector
from .judgement import SEVERITIES, Alternative, Evidence, FindingHarm, Judgement, Severity, TextJudgement, Verdict
from .registry import catalogue, effects, explains

FindingState = Literal["pending", "firing", "suppressed", "resolved"]

Place = tuple[str, str, str]
"""Engine, code and key: the identity of a problem."""

RESOLVE_AFTER_NS: Final = 3_000_000_000
EFFECT_LASTS_NS: Final = 30_000_000_000
"""So long after its cause an effect may go on: a queue that has grown takes its time."""
RETURNS_S: Final = 600.0
"""A finding that fires again within this time of its end is the same one, and so is its alert: whoever looked into it
then has hardly finished, and must not be told of a second problem.
"""
MAX_INTERVALS: Final = 10
"""Earlier intervals that a finding keeps, the latest ones."""
LOOK_AGAIN_S: Final = 300.0
"""The time after a restart during which a judgement in the place of an open alert continues it."""
MAX_RESOLVED: Final = 1_000
"""Bound for each engine."""
MAX_SET_ASIDE: Final = 256
"""Engines that are not watched any more, whose findings are kept as they were."""
MAX_KEPT_CULPRITS: Final = 10_000
"""Requests that a finding keeps of its whole life."""


class Culprits(msgspec.Struct, frozen=True):
    """The requests and blocks of a finding: their ids."""

    requests: list[str]
    blocks: list[int]


class Effect(msgspec.Struct, frozen=True):
    """A finding caused by another one: its code, since when, and the requests it concerns now or concerned last."""

    code: str
    since: str | None
    requests: list[str]


class FindingInterval(msgspec.Struct, frozen=True):
    """When a finding fired before (RFC 3339)."""

    since: str | None
    resolved_at: str | None


class FindingReport(msgspec.Struct, frozen=True):
    """A finding as every outlet shows it. Times are RFC 3339. Lists are empty, never null."""

    id: str
    code: str
    title: str
    severity: Severity
    verdict: Verdict
    state: FindingState
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
    effects: list[Effect] = []
    caused_by: list[str] = []
    """The codes of its root causes, if it is suppressed."""
    alternatives: list[Alternative] = []
    """Other explanations, each with what excludes it. A confirmed finding has all of them excluded."""
    harm: FindingHarm | None = None
    """None where nothing is measured: from metrics, a log or a report."""
    earlier: list[FindingInterval] = []
    """When it fired before: a finding that returns within RETURNS_S is the same one."""


class Interval(NamedTuple):
    """When a finding was there, and from when it fired (wall ns)."""

    since_ns: int
    fired_ns: int
    resolved_ns: int


class Finding:
    """One problem of one engine, from its first judgement to its end. Times are wall ns."""

    def __init__(self, judgement: Judgement, now_ns: int, first_seen_ns: int = 0) -> None:
        self.judgement = judgement
        self.state: FindingState = "pending"
        self.first_seen_ns = first_seen_ns or now_ns
        self.last_seen_ns = now_ns
        self.fired_ns = 0
        self.resolved_ns = 0
        self.effects: dict[str, Effect] = {}
        """All that it ever had, by code."""
        self.causes: list[Finding] = []
        """The roots that explain it, or did last."""
        self.explained_ns = 0
        self.unseen_until_ns = 0
        """Its engine is watched again, and until then the detectors have time to see it again (0: they did)."""
        self.is_past = False
        """Whether the evidence has ended, so that no more follows."""
        self.before: Finding | None = None
        """What it is if it fires: the finding that was resolved in its place a short time ago."""
        self.earlier: tuple[Interval, ...] = ()
        self._worst: Severity = "none"
        self._requests: dict[str, None] = {}
        self._take(judgement)

    def judge(self, judgement: Judgement, now_ns: int) -> None:
        """Take the judgement of now."""
        alike = judgement.requests == self.judgement.requests
        self.judgement, self.last_seen_ns, self.unseen_until_ns = judgement, now_ns, 0
        self._take(judgement, alike=alike)

    def _take(self, judgement: Judgement, *, alike: bool = False) -> None:
        severity = judgement.severity or catalogue()[judgement.code].severity
        if severity_at_least(severity, self._worst):
            self._worst = severity
        if not alike and len(self._requests) < MAX_KEPT_CULPRITS:
            self._requests.update(dict.fromkeys(judgement.requests))

    def fire(self, now_ns: int) -> None:
        """Begin to fire, as another interval of the finding before if there is one."""
        self.state, self.fired_ns = "firing", now_ns
        before, self.before = self.before, None
        if before is not None:
            self.earlier = tuple(before.intervals(now_ns)[-MAX_INTERVALS:])
            self.effects = before.effects | self.effects
            self._requests = before._requests | self._requests

    @property
    def _detector(self) -> type[Detector[Any]]:
        return catalogue().get(self.judgement.code, Detector)

    @property
    def outlasts_epoch(self) -> bool:
        """Whether it is about the observer: the engine's restart or silence changes nothing for it."""
        return self._detector.outlasts_epoch

    @property
    def severity(self) -> Severity:
        """By its harm, as far as measured: the worst so far, since a finding that improves for a moment is not over."""
        return self._worst

    def _culprits(self) -> Culprits:
        """Return the current requests, or all that were ever named for a finding that is over."""
        over = (self.is_past or self.state == "resolved") and not self._detector.recurs
        return Culprits(list(self._requests if over else self.judgement.requests), list(self.judgement.blocks))

    @property
    def place(self) -> Place:
        """Where it is, and what."""
        return self.judgement.engine, self.judgement.code, self.judgement.key

    @property
    def id(self) -> str:
        """An id that stays the same until its end, and is no other finding's."""
        judged = self.judgement
        text = f"{judged.engine}\n{judged.code}\n{judged.key}\n{self.first_seen_ns}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def still(self) -> Finding:
        """Return a copy that later judgements do not change."""
        still = copy.copy(self)
        still.effects, still._requests = dict(self.effects), dict(self._requests)
        return still

    def intervals(self, now_ns: int) -> list[Interval]:
        """Return when the problem was there, in order; if it is not over, until now (wall)."""
        began_ns = self.judgement.since_ns or self.first_seen_ns
        if self.earlier and began_ns <= self.earlier[-1].resolved_ns:  # a state that outlasts its being told
            began_ns = self.fired_ns
        return [*self.earlier, Interval(began_ns, self.fired_ns, self.resolved_ns or now_ns)]

    def report(self) -> FindingReport:
        """Return the finding as the API and all outputs show it."""
        judged = self.judgement
        return FindingReport(
            id=self.id,
            code=judged.code,
            title=catalogue()[judged.code].title,
            severity=self.severity,
            verdict=judged.verdict,
            state=self.state,
            engine=judged.engine,
            since=timestamp(judged.since_ns),
            position=judged.position,
            resolved_at=timestamp(self.resolved_ns),
            culprits=self._culprits(),
            evidence=list(judged.evidence),
            explanation=judged.explanation,
            do_now=list(judged.do_now),
            change=list(judged.change),
            wont_help=list(judged.wont_help),
            missing=judged.missing,
            runbook=runbook(judged.code),
            effects=list(self.effects.values()),
            caused_by=sorted({cause.judgement.code for cause in self.causes}) if self.state == "suppressed" else [],
            alternatives=list(judged.alternatives),
            harm=judged.harm,
            earlier=[FindingInterval(timestamp(one.since_ns), timestamp(one.resolved_ns)) for one in self.earlier],
        )


class Transition(NamedTuple):
    """A finding has just begun to fire, or has just been resolved."""

    finding: Finding
    to: Literal["firing", "resolved"]
    at_ns: int


class SetAside(NamedTuple):
    """The open findings of an engine when it was last watched (wall ns by its own stream), or those that another
    service knows, whose time is by another clock: None.
    """

    at_ns: int | None
    findings: list[Finding]


class Findings:
    """All findings of all engines. `update` with every engine's judgements, as often as they are made."""

    def __init__(self) -> None:
        self._open: dict[Place, Finding] = {}
        self._resolved: dict[str, deque[Finding]] = {}
        self._aside: OrderedDict[str, SetAside] = OrderedDict()
        self._known: dict[Place, int] = {}
        self._known_until_ns = 0

    def still(self) -> Findings:
        """Return a copy that later judgements do not change."""
        still = copy.copy(self)
        still._open = {place: finding.still() for place, finding in self._open.items()}
        still._resolved = {engine: ended.copy() for engine, ended in self._resolved.items()}
        still._aside = self._aside.copy()
        return still

    def remember(self, known: Mapping[Place, int], until_ns: int) -> None:
        """Take what was open in an earlier life of the service, and when it was first seen there (wall ns). A judgement
        in the same place before `until_ns` is the same finding, with the same id.
        """
        self._known = dict(known)
        self._known_until_ns = until_ns

    def recall(self, resolved: Iterable[Finding]) -> None:
        """Take what was over in an earlier life of the service, in order."""
        for finding in resolved:
            self._resolved.setdefault(finding.judgement.engine, deque(maxlen=MAX_RESOLVED)).append(finding)

    def set_aside(self, engine: str, now_ns: int) -> None:
        """Keep what is open of an engine that is not watched any more: nothing shows whether it is over.

        If `update` is called for the engine within LOOK_AGAIN_S of stream time, its findings are open again.
        """
        leaving = [key for key in self._open if key[0] == engine]
        found = [self._open.pop(key) for key in leaving]
        self._aside[engine] = SetAside(now_ns, [finding for finding in found if finding.state != "pending"])
        self._aside.move_to_end(engine)
        while len(self._aside) > MAX_SET_ASIDE:
            oldest, _ = self._aside.popitem(last=False)
            self._resolved.pop(oldest, None)

    def expect(self, engine: str, findings: Iterable[Finding]) -> None:
        """Take what another service found on an engine that is watched here from now on, as `set_aside` does what was
        found here. Findings that fire here by themselves go on unchanged.
        """
        firing = {place for place, finding in self._open.items() if finding.state != "pending"}
        self._aside[engine] = SetAside(None, [finding for finding in findings if finding.place not in firing])
        self._aside.move_to_end(engine)

    def _take_back(self, engine: str, now_ns: int) -> None:
        aside = self._aside.pop(engine, None)
        if aside is not None and (aside.at_ns is None or now_ns - aside.at_ns < LOOK_AGAIN_S * 1e9):
            for finding in aside.findings:
                finding.unseen_until_ns = now_ns + round(LOOK_AGAIN_S * 1e9)
                finding.last_seen_ns = min(finding.last_seen_ns, now_ns)  # another service's clock may be ahead
                self._open[finding.place] = finding

    def update(
        self,
        engine: str,
        now_ns: int,
        judgements: Iterable[Judgement],
        epoch_ns: int = 0,
        last_received_ns: int | None = None,
    ) -> list[Transition]:
        """Fold in all judgements of one engine at `now_ns` (wall). Return the changes. A finding from before
        `epoch_ns`, when the engine started, ends with the process that it is about. `last_received_ns`: when the engine
        last sent something (None: now). While it is silent nothing shows that a problem is over.
        """
        self._take_back(engine, now_ns)
        transitions = []
        for judged in judgements:
            key = (judged.engine, judged.code, judged.key)
            finding = self._open.get(key)
            if finding is not None and 0 < finding.last_seen_ns <= epoch_ns and not finding.outlasts_epoch:
                transitions += self._end(key, finding, now_ns)
                finding = None
            if finding is None:
                finding = self._open[key] = self._begin(judged, now_ns, epoch_ns)
            if finding.unseen_until_ns and finding.state == "firing":
                transitions.append(Transition(finding, "firing", now_ns))  # as after a restart: known, and still so
            finding.judge(judged, now_ns)
        for key, finding in list(self._open.items()):
            if now_ns < finding.unseen_until_ns and finding.last_seen_ns > epoch_ns:
                continue
            settles = finding.state == "firing" and not 0 < finding.last_seen_ns <= epoch_ns
            after_ns = max(RESOLVE_AFTER_NS, finding._detector.settles_s * 1e9 if settles else 0)
            observer = last_received_ns is None or finding.outlasts_epoch
            until_ns = now_ns if observer else min(now_ns, last_received_ns or 0)
            if key[0] == engine and until_ns - finding.last_seen_ns >= after_ns:
                transitions += self._end(key, finding, now_ns)
        return transitions + self._separate_causes(engine, now_ns)

    def _begin(self, judged: Judgement, now_ns: int, epoch_ns: int) -> Finding:
        """Return the finding of a first judgement: a new one, or one that was known or was here a short time ago."""
        place = judged.engine, judged.code, judged.key
        known_ns = self._known.pop(place, 0)
        finding = Finding(judged, now_ns, known_ns if now_ns < self._known_until_ns else 0)
        for before in reversed(self._resolved.get(judged.engine, ())):
            if before.place == place:
                is_same_process = before.resolved_ns > epoch_ns or before.outlasts_epoch
                returns = is_same_process and now_ns - before.resolved_ns < RETURNS_S * 1e9
                if returns or 0 < before.first_seen_ns == known_ns:
                    finding.before, finding.first_seen_ns = before, before.first_seen_ns
                break
        return finding

    def _fire(self, finding: Finding, now_ns: int) -> Transition:
        ended = self._resolved.get(finding.judgement.engine)
        if ended is not None and finding.before is not None and finding.before in ended:
            ended.remove(finding.before)
        finding.fire(now_ns)
        return Transition(finding, "firing", now_ns)

    def _end(self, key: Place, finding: Finding, now_ns: int) -> list[Transition]:
        del self._open[key]
        if finding.state != "firing":
            return []
        finding.state = "resolved"
        finding.resolved_ns = finding.last_seen_ns
        self._resolved.setdefault(key[0], deque(maxlen=MAX_RESOLVED)).append(finding)
        return [Transition(finding, "resolved", now_ns)]

    def close(self) -> None:
        """Take all that is open as it stood at the end of the evidence: of a recording or a log."""
        for finding in self._open.values():
            finding.is_past = True

    def _separate_causes(self, engine: str, now_ns: int) -> list[Transition]:
        """Causes of what is beyond its grace fire, and their effects do not."""
        ripe = [
            finding
            for finding in self._open.values()
            if finding.judgement.engine == engine and (finding.state != "pending" or not finding.judgement.pending)
        ]
        may_explain = [finding for finding in ripe if finding.judgement.code in effects()]
        explained = {
            finding.place: [cause for cause in may_explain if explains(cause.judgement, finding.judgement)]
            for finding in ripe
        }
        transitions = []
        for finding in ripe:
            if explained[finding.place]:
                finding.causes = _roots(finding, explained)
                finding.explained_ns = now_ns
                if finding.state == "firing":
                    transitions.append(Transition(finding, "resolved", now_ns))
                finding.state = "suppressed"
            elif finding.state == "pending" or (
                finding.state == "suppressed"
                and finding.last_seen_ns == now_ns
                and now_ns - finding.explained_ns >= EFFECT_LASTS_NS
                and not (finding._detector.counts_events and finding.judgement.since_ns < finding.explained_ns)
            ):
                transitions.append(self._fire(finding, now_ns))
        _list_effects(finding for finding in ripe if explained[finding.place])
        return transitions

    def firing(self) -> list[Finding]:
        """Return the open findings, the worst first."""
        return sorted((f for f in self._open.values() if f.state == "firing"), key=finding_order)

    def pending(self) -> list[Finding]:
        """Return the findings that may be about to fire."""
        return [finding for finding in self._open.values() if finding.state == "pending"]

    def suppressed(self) -> list[Finding]:
        """Return the findings that others explain, and list."""
        return [finding for finding in self._open.values() if finding.state == "suppressed"]

    def resolved(self) -> list[Finding]:
        """Return the resolved findings, the latest first."""
        ended = (finding for findings in self._resolved.values() for finding in findings)
        return sorted(ended, key=lambda finding: -finding.resolved_ns)

    def set_aside_since(self, at_ns: int) -> list[Finding]:
        """Return the findings that fired at a time (wall ns), of engines that are not watched any more."""
        aside = (finding for each in self._aside.values() for finding in each.findings)
        return [finding for finding in aside if finding.state == "firing" and finding.last_seen_ns >= at_ns]

    def by_id(self, id: str) -> Finding | None:
        """Return the finding of that id, if it is open, set aside, or was resolved not too long ago."""
        others = (*self.suppressed(), *self.pending())  # one that returns has the id of the resolved one already
        known = (*self.firing(), *self.set_aside_since(0), *self.resolved(), *others)
        return next((finding for finding in known if finding.id == id), None)


def _roots(finding: Finding, explained: Mapping[Place, list[Finding]]) -> list[Finding]:
    """Return its root causes, which nothing else explains. A finding explained until a moment ago keeps the causes of
    then.
    """
    roots: dict[Place, Finding] = {}
    for cause in explained[finding.place]:
        if explained[cause.place]:
            above = _roots(cause, explained)
        else:
            above = cause.causes if cause.state == "suppressed" else [cause]
        roots.update((root.place, root) for root in above)
    return list(roots.values())


def _list_effects(findings: Iterable[Finding]) -> None:
    """Enter each with its causes, those of one code together."""
    by_code: dict[tuple[Place, str], list[Finding]] = {}
    causes: dict[Place, Finding] = {}
    for finding in findings:
        for cause in finding.causes:
            causes[cause.place] = cause
            by_code.setdefault((cause.place, finding.judgement.code), []).append(finding)
    for (place, code), alike in by_code.items():
        before = causes[place].effects.get(code)
        since = min((f.judgement.since_ns for f in alike if f.judgement.since_ns), default=0)
        requests = list(dict.fromkeys(name for f in alike for name in f.judgement.requests))
        began = before.since if before is not None else timestamp(since)
        causes[place].effects[code] = Effect(code, began, requests)


def runbook(code: str) -> str:
    """Return the page that explains a code. The service serves it under the same path."""
    return f"docs/runbooks/{code}.md"


def severity_at_least(severity: str, bar: Severity) -> bool:
    """Whether it is as grave as `bar`, or graver."""
    return SEVERITIES.index(severity) >= SEVERITIES.index(bar)


def finding_order(finding: Finding) -> tuple[int, int, int, int, int]:
    """Order by severity, then by how many clients a cure relieves, by effects and by age. Hypotheses come last, the
    most probable first.
    """
    rank = finding.judgement.rank if isinstance(finding.judgement, TextJudgement) else 0
    severity = 0 if rank else -SEVERITIES.index(finding.severity)
    harm = finding.judgement.harm
    relieved = harm.requests_waiting or 0 if harm is not None else 0
    return rank, severity, -relieved, -len(finding.effects), finding.first_seen_ns
