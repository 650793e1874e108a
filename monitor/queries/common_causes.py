"""Findings of one code on several engines, grouped by what these engines share: a release, a zone, a node, a time.

A group is listed only where chance is a poor explanation: by the hypergeometric distribution for what engines share, by
Poisson's for findings that began together, corrected for the groups that were tried. It names what is in common, which
is not yet the cause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, NamedTuple

from kvscope.monitor.detectors.judgement import SEVERITIES
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.fleet_schema import CauseKind, FleetCause, FleetEngineView
from kvscope.monitor.text import counted

LEAST_ENGINES: Final = 3
CHANCE: Final = 0.001
"""The most probable that chance may be, times the groups that were tried."""
TOGETHER_S: Final = 60.0
LEAST_SPAN_S: Final = 3_600.0
"""Findings are compared with as many of them spread over this time, or over what they span if that is longer."""
MOST_CAUSES: Final = 50
MOST_IDS: Final = 500

SHARED: Final[tuple[tuple[CauseKind, str, Callable[[FleetEngineView], str]], ...]] = (
    ("release", "release", lambda engine: engine.version),
    ("model", "model", lambda engine: engine.model),
    ("zone", "zone", lambda engine: engine.zone),
    ("node", "node", lambda engine: engine.node),
    ("agent", "agent", lambda engine: engine.agent),
    ("connector", "KV connector", lambda engine: engine.connector),
)


class _Candidate(NamedTuple):
    chance: float
    cause: FleetCause


def common_causes(engines: Sequence[FleetEngineView], firing: Iterable[FindingReport]) -> list[FleetCause]:
    """Return the groups, the least probable by chance first. `firing`: findings that fire on these engines."""
    known = {engine.engine: engine for engine in engines}
    by_code: dict[str, list[FindingReport]] = defaultdict(list)
    for finding in firing:
        if finding.severity != "info" and finding.engine in known:
            by_code[finding.code].append(finding)
    found: list[_Candidate] = []
    for of_code in by_code.values():
        if len({finding.engine for finding in of_code}) >= LEAST_ENGINES:
            found += _shared(known, of_code)
            found += _began_together(of_code)
    return [each.cause for each in sorted(found, key=lambda each: each.chance)[:MOST_CAUSES]]


def _shared(known: dict[str, FleetEngineView], of_code: Sequence[FindingReport]) -> Iterator[_Candidate]:
    """Yield what the engines of a code share, and others do not."""
    hit = {finding.engine for finding in of_code}
    for kind, word, value_of in SHARED:
        members: dict[str, set[str]] = defaultdict(set)
        for engine in known.values():
            if value_of(engine):
                members[value_of(engine)].add(engine.engine)
        for name, group in members.items():
            both = hit & group
            if len(both) < LEAST_ENGINES:
                continue
            chance = at_least_by_chance(len(known), len(group), len(hit), len(both)) * len(members)
            if chance < CHANCE:
                others, outside = len(hit - group), len(known) - len(group)
                text = (
                    f"{len(both)} of {counted(len(group), 'engine')} with {word} {name} have it, and {others} of"
                    f" {counted(outside, 'other engine')}."
                )
                yield _Candidate(chance, _cause(kind, name, of_code, both, len(group), text))


def at_least_by_chance(total: int, group: int, hits: int, both: int) -> float:
    """Return how probable it is that `both` or more of `hits` engines, drawn from `total`, are in a group of them."""
    most = min(group, hits)
    whole = _log_choose(total, hits)
    return sum(
        math.exp(_log_choose(group, count) + _log_choose(total - group, hits - count) - whole)
        for count in range(both, most + 1)
        if hits - count <= total - group
    )


def _log_choose(of: int, count: int) -> float:
    return math.lgamma(of + 1) - math.lgamma(count + 1) - math.lgamma(of - count + 1)


def _began_together(of_code: Sequence[FindingReport]) -> Iterator[_Candidate]:
    """Yield the largest group of engines on which a code began within TOGETHER_S."""
    began: dict[str, float] = {}
    for finding in of_code:
        if finding.since:
            at_s = datetime.fromisoformat(finding.since).timestamp()
            began[finding.engine] = min(at_s, began.get(finding.engine, at_s))
    times = sorted((at_s, engine) for engine, at_s in began.items())
    if len(times) < LEAST_ENGINES:
        return
    largest, first = times[:1], 0
    for last, (at_s, _) in enumerate(times):
        while at_s - times[first][0] > TOGETHER_S:
            first += 1
        largest = max(largest, times[first : last + 1], key=len)
    span_s = max(times[-1][0] - times[0][0], LEAST_SPAN_S)
    chance = _poisson_at_least(len(times) * TOGETHER_S / span_s, len(largest)) * span_s / TOGETHER_S
    if len(largest) >= LEAST_ENGINES and chance < CHANCE:
        engines = {engine for _, engine in largest}
        within_s = largest[-1][0] - largest[0][0]
        text = f"It began on {counted(len(engines), 'engine')} within {within_s:.0f} s."
        since = min(finding.since or "" for finding in of_code if finding.engine == largest[0][1] and finding.since)
        yield _Candidate(chance, _cause("time", since, of_code, engines, len(began), text))


def _poisson_at_least(mean: float, count: int) -> float:
    below = sum(math.exp(each * math.log(mean) - mean - math.lgamma(each + 1)) for each in range(count))
    return max(0.0, 1.0 - below)


def _cause(
    kind: CauseKind, name: str, of_code: Sequence[FindingReport], engines: set[str], of_engines: int, text: str
) -> FleetCause:
    own = [finding for finding in of_code if finding.engine in engines]
    worst = max(own, key=lambda finding: SEVERITIES.index(finding.severity))
    return FleetCause(
        kind=kind,
        name=name,
        code=worst.code,
        title=worst.title,
        severity=worst.severity,
        engines=sorted(engines),
        of_engines=of_engines,
        findings=[finding.id for finding in own][:MOST_IDS],
        since=min((finding.since for finding in own if finding.since), default=None),
        explanation=text,
    )
