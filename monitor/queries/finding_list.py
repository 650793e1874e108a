"""Findings by state and window."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.findings import Finding, FindingReport, Findings, FindingState

FOREVER: Final = 1 << 62


def findings_between(
    findings: Findings, state: FindingState | None, engine: str, from_ns: int, to_ns: int
) -> list[FindingReport]:
    """Return findings in a state (firing and resolved without one), of one engine if named, active in a window (wall
    ns).
    """
    found: list[Finding] = []
    if state in (None, "firing"):
        found += findings.firing() + findings.set_aside_since(to_ns)
    if state in (None, "resolved"):
        found += findings.resolved()
    if state == "pending":
        found += findings.pending()
    if state == "suppressed":
        found += findings.suppressed()
    return [
        finding.report()
        for finding in found
        if engine in ("", finding.judgement.engine) and touches(finding, from_ns, to_ns)
    ]


def fired_between(findings: Findings, engine: str, from_ns: int, to_ns: int) -> list[FindingReport]:
    """Return findings of an engine that were active in a window (wall ns) and had fired by its end."""
    return [
        finding.report()
        for finding in (
            *findings.firing(),
            *findings.set_aside_since(to_ns),
            *findings.suppressed(),
            *findings.resolved(),
        )
        if finding.judgement.engine == engine and 0 < finding.fired_ns <= to_ns and touches(finding, from_ns, to_ns)
    ]


def firing_by_severity(findings: Findings, engine: str, at_ns: int = FOREVER) -> dict[str, int]:
    """Count the findings of an engine that fire now, or fired at a time (wall ns), by severity."""
    counts: dict[str, int] = {}
    for finding in (*findings.firing(), *findings.set_aside_since(at_ns), *findings.resolved()):
        ended_ns = finding.resolved_ns or FOREVER + 1
        if finding.judgement.engine == engine and finding.fired_ns <= at_ns < ended_ns:
            counts[finding.severity] = counts.get(finding.severity, 0) + 1
    return counts


def touches(finding: Finding, from_ns: int, to_ns: int) -> bool:
    """Return whether a finding was active in a window (wall ns)."""
    began_ns, ended_ns = finding.life(FOREVER)
    return began_ns <= to_ns and ended_ns >= from_ns
