"""Mutants that change nothing that can be seen: by module, function, line of source and change, the proof."""

from __future__ import annotations

from typing import Final

_FINDINGS: Final = "kvscope.monitor.findings"
_RULES: Final = "kvscope.monitor.detectors"

ACCEPTED_MUTANTS: Final[dict[tuple[str, str, str, str], str]] = {
    (
        _FINDINGS,
        "Findings.__init__",
        "self._known_until_ns = 0",
        "0 -> 1",
    ): "no place is known before remember(), which sets both",
    (
        _FINDINGS,
        "Findings.update",
        "if finding is not None and 0 < finding.last_seen_ns <= epoch_ns and not key[1].startswith(OUTLASTS_EPOCH):",
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never 1",
    (
        _FINDINGS,
        "Findings.update",
        'settles = finding.state == "firing" and not 0 < finding.last_seen_ns <= epoch_ns',
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never 1",
    (
        _FINDINGS,
        "Findings.update",
        "until_ns = now_ns if observer else min(now_ns, last_received_ns or 0)",
        "0 -> 1",
    ): "without last_received_ns, observer is true and this is not evaluated",
    (
        _FINDINGS,
        "Findings.update",
        "until_ns = now_ns if observer else min(now_ns, last_received_ns or 0)",
        "last_received_ns or 0 -> last_received_ns",
    ): "without last_received_ns, observer is true and this is not evaluated",
    (
        _FINDINGS,
        "finding_order",
        "severity = 0 if rank else -SEVERITIES.index(finding.severity)",
        "0 -> 1",
    ): "it is compared only among findings of one rank other than 0, which all have it",
    (
        _FINDINGS,
        "Finding.__init__",
        "self.unseen_until_ns = 0",
        "0 -> 1",
    ): "judge() sets it to 0 before the finding can fire, and no time is before 1 ns",
    (
        _FINDINGS,
        "Finding.__init__",
        "self.explained_ns = 0",
        "0 -> 1",
    ): "it is read only of suppressed findings, and suppressing sets it",
    (
        _FINDINGS,
        "Finding._take",
        "if not alike and len(self._requests) < MAX_KEPT_CULPRITS:",
        "not alike and len(self._requests) < MAX_KEPT_CULPRITS -> len(self._requests) < MAX_KEPT_CULPRITS",
    ): "requests like the last ones are in it already, so that adding them again changes nothing",
    (
        _FINDINGS,
        "Findings.by_id",
        "known = (*self._open.values(), *self.set_aside_since(0), *self.resolved())",
        "0 -> 1",
    ): "a wall clock in ns since 1970 is never below 1",
    (
        f"{_RULES}.stuck.unadmitted_queue",
        "_admits_nothing",
        "admitted = (after.running or 0) - (before.running or 0) + moved(before.finished, after.finished)",
        "0 -> 1",
    ): "requests run in both samples: _waits_beside_room was true of either",
    (
        f"{_RULES}.written.contradictions",
        "impossible_usage",
        'value = number_of(lines[0], "value") or 0.0',
        "0.0 -> 1.0",
    ): "a line without a value, or with 0, is within bounds and not among the lines",
    (
        f"{_RULES}.preemption_counts",
        "counted_preemptions",
        "ended = (last.finished or 0) - (first.finished or 0) + (last.aborted or 0) - (first.aborted or 0)",
        "first.finished or 0 -> first.finished",
    ): "a sample without it ends the window before it",
}
