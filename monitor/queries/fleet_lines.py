"""Engines in a line each, as the answer to `fleet_overview` lists them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscope.monitor.detectors.judgement import SEVERITIES
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.fleet_schema import (
    FleetAgentView,
    FleetEngineView,
    FleetNote,
    FleetView,
    KVRole,
    fleet_order,
    harm_of,
    usage_strip,
)
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.queries.common_causes import common_causes
from kvscope.monitor.queries.paired_services import paired_services
from kvscope.monitor.schema import EngineView


def ledger_strip(ledger: EngineLedger) -> list[int]:
    """Return the usage strip of an engine, from the points or samples that its ledger has in memory."""
    if not ledger.has_stream:
        return usage_strip(((sample.at_ns or 0, sample.usage) for sample in ledger.samples), ledger.now_ns)
    shares = (
        (
            point.at_ns,
            _share_in_use(point.balance.total - point.balance.reserved, point.balance.free, point.balance.cached_idle),
        )
        for point in ledger.points
    )
    return usage_strip(shares, ledger.now_ns)


def _share_in_use(usable: int, free: int, cached_idle: int) -> float | None:
    return (usable - free - cached_idle) / usable if usable > 0 else None


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
        codes=list(dict.fromkeys(finding.code for finding in worst_first if finding.severity != "info")),
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
