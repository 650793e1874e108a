"""Which transitions become alerts, by the verdict of their finding."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope.monitor.detectors.judgement import VERDICTS, Severity, Verdict
from kvscope.monitor.findings import Transition


class VerdictSelection:
    """Holds back what fires with a verdict below `least` until it reaches that. Findings that were let through come
    again when their verdict or severity changes, so that silences by these apply to what holds now.
    """

    def __init__(self, least: Verdict = "cannot-tell") -> None:
        self._least = VERDICTS.index(least)
        self._open: dict[str, tuple[Transition, tuple[Verdict, Severity] | None]] = {}
        """By finding id: the transition to firing, and the verdict and severity that were let through (None: held)."""

    def select(self, transitions: Iterable[Transition]) -> list[Transition]:
        """Take what is new, and return what becomes or changes an alert now."""
        selected: list[Transition] = []
        for transition in transitions:
            id = transition.finding.id
            if transition.to == "firing":
                self._open[id] = (transition, None)
                continue
            _, let_through = self._open.pop(id, (transition, ("confirmed", "info")))
            if let_through is not None:
                selected.append(transition)
        for id, (transition, let_through) in self._open.items():
            now = transition.finding.judgement.verdict, transition.finding.severity
            if now != let_through and (let_through or VERDICTS.index(now[0]) >= self._least):
                self._open[id] = (transition, now)
                selected.append(transition)
        return selected
