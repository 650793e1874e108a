"""Transitions of findings, as a Pipeline tells them, for what delivers them."""

from __future__ import annotations

from kvscope.monitor.detectors.findings import RESOLVE_AFTER_NS, Findings, Transition, severity_at_least
from kvscope.monitor.detectors.judgement import Judgement
from tests.detectors.scenes import finished_held

S = 1_000_000_000
ENGINE = "a@127.0.0.1:1/0"


def leak() -> list[Transition]:
    """A real leak that fires and is resolved, and a warm cache that is told beside it."""
    scene = finished_held("leak.finished-held:limit=2")
    scene.live(15)
    assert scene.lab.connector is not None
    for number in list(scene.lab.scheduler.deferred):
        scene.lab.connector._pending[number] = 0
    scene.live(15)
    return scene.watch.take_transitions()


def graver(reported: list[Transition]) -> list[Transition]:
    """Those that alerts are about."""
    return [t for t in reported if severity_at_least(t.finding.severity, "warning")]


class AlertMessages:
    """Judgements made to order, each folded by the real Findings."""

    def __init__(self) -> None:
        self.findings = Findings()

    def fire(self, second: float, code: str = "leak.finished-held", **fields: object) -> list[Transition]:
        fields = {"explanation": "because", **fields}
        engine = str(fields.pop("engine", ENGINE))
        judged = Judgement(code, engine, "confirmed", **fields)  # type: ignore[arg-type]
        return self.findings.update(engine, round(second * S), [judged])

    def end(self, second: float, engine: str = ENGINE) -> list[Transition]:
        """Everything of that engine, which was seen last a moment before."""
        return self.findings.update(engine, round(second * S) + RESOLVE_AFTER_NS, [])
