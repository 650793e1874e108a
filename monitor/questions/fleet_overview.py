"""The answer to `fleet_overview`: engines in a line each, the causes that several share, and services in two halves.

Findings of one code on several engines are grouped by what these engines share: a release, a zone, a node, a time. A
group is listed only where chance is a poor explanation: by the hypergeometric distribution for what engines share, by
Poisson's for findings that began together, corrected for the groups that were tried. It names what is in common, which
is not yet the cause.

The prefill and decode engines of a service are paired, with a statement about which side holds the other up. It rests
on findings that fire, never on the numbers of one moment: a healthy pair holds blocks and waits for transfers all the
time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple

from ..base.text import counted
from ..contract.kinds import Cause
from ..detectors.findings import FindingReport, severity_at_least
from ..detectors.judgement import SEVERITIES
from ..detectors.registry import catalogue
from ..ledger.engine_ledger import EngineLedger
from .engines import present_ns
from .fleet_schema import (
    UNSERVED_STATUSES,
    CauseKind,
    FleetAgentView,
    FleetCause,
    FleetEngineView,
    FleetNote,
    FleetService,
    FleetView,
    HeldUpBy,
    KVRole,
    fleet_order,
    harm_of,
    usage_strip,
)
from .schema import EngineView


def ledger_strip(ledger: EngineLedger) -> list[int]:
    """Return the usage strip of an engine, from the points or samples that its ledger has in memory."""
    if not ledger.has_stream:
        return usage_strip(((sample.at_ns or 0, sample.usage) for sample in ledger.samples), present_ns(ledger))
    return usage_strip(((point.at_ns, point.balance.usage) for point in ledger.points), present_ns(ledger))


def findings_by_engine(findings: Iterable[FindingReport]) -> dict[str, list[FindingReport]]:
    """Return findings by their engine."""
    found: dict[str, list[FindingReport]] = {}
    for finding in findings:
        found.setdefault(finding.engine, []).append(finding)
    return found


def fleet_engine(
    view: EngineView,
    own: Sequence[FindingReport],
    strip: Sequence[int],
    *,
    agent: str = "",
    zone: str = "",
    node: str = "",
    service: str = "",
    kv_role: str = "",
    age_s: float | None = None,
) -> FleetEngineView:
    """Return an engine's line. `own`: its findings that fire. kv_role: as configured. age_s: of the view, if it was
    sent here.
    """
    counts: dict[str, int] = {}
    for finding in own:
        counts[finding.severity] = counts.get(finding.severity, 0) + 1
    worst_first = sorted(own, key=lambda finding: -SEVERITIES.index(finding.severity))
    return FleetEngineView(
        engine=view.engine,
        harm=harm_of(view.status, counts),
        status=view.status,
        model=view.model,
        version=view.version,
        zone=zone,
        node=node,
        agent=agent,
        connector=str(view.configuration.get("kv_connector", "")),
        usage=view.usage,
        running=view.running,
        waiting=view.waiting,
        output_tokens_per_s=view.output_tokens_per_s,
        findings=counts,
        codes=list(
            dict.fromkeys(finding.code for finding in worst_first if severity_at_least(finding.severity, "warning"))
        ),
        age_s=round(view.last_seen_s_ago if age_s is None else age_s, 1),
        usage_strip=list(strip),
        service=service,
        kv_role=_kv_role(kv_role or str(view.configuration.get("kv_role", ""))),
        held_blocks=view.balance.finished if view.balance is not None else None,
        fetching=view.waiting_by_reason.get(Cause.REMOTE_KV.name, 0) if view.signal == "stream" else None,
    )


def _kv_role(text: str) -> KVRole:
    """Return the role in vLLM's words (kv_producer) or in ours, empty for any other text."""
    match text.removeprefix("kv_"):
        case "producer" | "consumer" | "both" as role:
            return role
    return ""


def fleet_view(
    engines: Iterable[FleetEngineView],
    firing: Sequence[FindingReport],
    agents: Sequence[FleetAgentView] = (),
    notes: Sequence[FleetNote] = (),
    *,
    is_complete: bool = True,
    unreadable: dict[str, int] | None = None,
) -> FleetView:
    """Return the overview of these engines."""
    lines = sorted(engines, key=fleet_order)
    return FleetView(
        engines=lines,
        causes=common_causes(lines, firing),
        notes=list(notes),
        agents=sorted(agents, key=lambda each: (not each.error, each.agent)),
        is_complete=is_complete,
        unreadable=unreadable or {},
        services=paired_services(lines),
    )


# -------------------------------------------------------------------- common causes


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
        if severity_at_least(finding.severity, "warning") and finding.engine in known:
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


# -------------------------------------------------------------------- services


NAMED_ENGINES: Final = 3


def _moves(codes: Iterable[str]) -> set[str]:
    """Return what findings of these codes say of transfers: `send` for KV that waits to be sent, `fetch` for KV that
    waits to be fetched.
    """
    return {catalogue()[code].moves_kv for code in codes if code in catalogue()}


class _Statement(NamedTuple):
    held_up_by: HeldUpBy = "none"
    verdict: Literal["", "likely", "cannot-tell"] = ""
    text: str = ""


def paired_services(engines: Sequence[FleetEngineView]) -> list[FleetService]:
    """Return the services that have engines on both sides, those with a statement first.

    Engines belong together by their service's name, or by model and zone where they have none.
    """
    groups: dict[tuple[str, str, str], list[FleetEngineView]] = {}
    for engine in engines:
        if engine.kv_role in ("producer", "consumer"):
            unnamed = ("", "") if engine.service else (engine.model, engine.zone)
            groups.setdefault((engine.service, *unnamed), []).append(engine)
    services = [
        _service(name or " · ".join(filter(None, (model, zone))) or "unnamed", "service" if name else "model", members)
        for (name, model, zone), members in groups.items()
        if len({each.kv_role for each in members}) == 2
    ]
    return sorted(services, key=lambda each: (not each.statement, each.name))


def _service(name: str, grouped_by: Literal["service", "model"], members: Sequence[FleetEngineView]) -> FleetService:
    producers = [each for each in members if each.kv_role == "producer"]
    consumers = [each for each in members if each.kv_role == "consumer"]
    statement = _statement(producers, consumers)
    return FleetService(
        name=name,
        grouped_by=grouped_by,
        producers=[each.engine for each in producers],
        consumers=[each.engine for each in consumers],
        held_blocks=_known_sum([each.held_blocks for each in producers]),
        fetching=_known_sum([each.fetching for each in consumers]),
        held_up_by=statement.held_up_by,
        verdict=statement.verdict,
        statement=statement.text,
    )


def _statement(producers: Sequence[FleetEngineView], consumers: Sequence[FleetEngineView]) -> _Statement:
    holding = [each for each in producers if "send" in _moves(each.codes)]
    fetching = [each for each in consumers if "fetch" in _moves(each.codes)]
    if fetching and holding:
        return _Statement(
            "transfer",
            "cannot-tell",
            f"{_fetching_text(fetching)}, and {_holding_text(holding)}: transfers between them do not complete. The"
            " engines' streams do not show which end of a transfer failed.",
        )
    if fetching:
        return _of_fetching(fetching, producers)
    if holding:
        return _of_holding(holding, consumers)
    return _Statement()


def _of_fetching(fetching: Sequence[FleetEngineView], producers: Sequence[FleetEngineView]) -> _Statement:
    away = [each for each in producers if each.status in UNSERVED_STATUSES]
    if away:
        return _Statement(
            "producers",
            "likely",
            f"{_fetching_text(fetching)}, and {_status_text(away)}. The KV may also be due from another producer.",
        )
    unknown = [each for each in producers if each.harm == "unknown"]
    seen = f" Nothing is known of {_names(unknown)} now." if unknown else ""
    return _Statement(
        "transfer",
        "cannot-tell",
        f"{_fetching_text(fetching)}. No producer is stuck, silent or stopped, or has a finding about held blocks."
        f"{seen}",
    )


def _of_holding(holding: Sequence[FleetEngineView], consumers: Sequence[FleetEngineView]) -> _Statement:
    stuck = [each for each in consumers if each.status in UNSERVED_STATUSES]
    if stuck:
        return _Statement(
            "consumers",
            "likely",
            f"{_holding_text(holding)}, and {_status_text(stuck)}. The producer's own connector may have failed, too.",
        )
    blind = [each for each in consumers if each.fetching is None]
    if blind:
        return _Statement(
            "none",
            "cannot-tell",
            f"{_holding_text(holding)}. Whether consumers wait for them is not exposed by {_names(blind)}.",
        )
    return _Statement(
        "none",
        "cannot-tell",
        f"{_holding_text(holding)}. No consumer is stuck, silent or stopped, or has a finding about its fetches.",
    )


def _holding_text(holding: Sequence[FleetEngineView]) -> str:
    blocks = _known_sum([each.held_blocks for each in holding])
    amount = "blocks" if blocks is None else counted(blocks, "block")
    return f"{_names(holding)} hold{'s' if len(holding) == 1 else ''} {amount} of finished requests for transfers"


def _fetching_text(fetching: Sequence[FleetEngineView]) -> str:
    requests = _known_sum([each.fetching for each in fetching])
    amount = "requests" if requests is None else counted(requests, "request")
    verb = "waits" if requests == 1 else "wait"
    return f"{amount} of {_names(fetching)} {verb} for KV whose fetch does not complete"


def _status_text(engines: Sequence[FleetEngineView]) -> str:
    return " and ".join(f"{each.engine} is {each.status}" for each in engines[:NAMED_ENGINES]) + _more(engines)


def _names(engines: Sequence[FleetEngineView]) -> str:
    return ", ".join(each.engine for each in engines[:NAMED_ENGINES]) + _more(engines)


def _more(engines: Sequence[FleetEngineView]) -> str:
    return f" and {len(engines) - NAMED_ENGINES} more" if len(engines) > NAMED_ENGINES else ""


def _known_sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
