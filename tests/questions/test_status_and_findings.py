"""Status and findings agree, whatever is wrong: each scene of a rule, and each with a fact that voids it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from kvscope.monitor.detectors.findings import severity_at_least
from kvscope.monitor.outputs.prometheus.service_metrics import StatusFamilies
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.request_details import request_detail
from kvscope.monitor.questions.schema import EngineView
from kvscope.monitor.terminal.top_text import engines as listed_engines
from tests.detectors.rules_of_blocks import CORRUPT, LEAKS, SIZES, WASTE, Rule, Scene
from tests.detectors.rules_of_requests import HARM, PAUSED, STUCK
from tests.detectors.stuck import zero_token
from tests.detectors.test_unclaimed_harm import Cause, idle_with_one_waiting


def scenes() -> Iterator[tuple[str, Scene]]:
    families: tuple[dict[str, Rule], ...] = (LEAKS, STUCK, WASTE, CORRUPT, SIZES, HARM)
    for name, rule in [each for family in families for each in family.items()]:
        yield name, rule.confirmed
        yield from ((f"{name}, {fact}", scene) for fact, scene in rule.voided.items())
    yield from ((f"{name}, paused", scene) for name, scene in PAUSED.items())


SCENES: Final = dict(scenes())
TROUBLES: Final = ("stuck", "slow", "degraded")


def agree(watch: Pipeline) -> set[str]:
    """The status of each engine, which its findings bear out, as `/metrics` and `top` have it too."""
    open_harms: dict[str, set[str]] = {}
    for finding in watch.lifecycle.firing():
        if severity_at_least(finding.severity, "warning") and not finding.outlasts_epoch:
            open_harms.setdefault(finding.judgement.engine, set()).add(finding.judgement.code)
    views = watch.engines()
    for view in views:
        harms = open_harms.get(view.engine, set())
        assert set(view.status_findings) == (harms if view.status in TROUBLES else set())
        assert view.status_findings or view.status not in TROUBLES
        assert not (view.status == "serving" and harms)
        assert exported(view) == view.status == listed(view)
    return {view.status for view in views}


def exported(view: EngineView) -> str:
    """As `/metrics` has it."""
    families = StatusFamilies()
    families.add(view)
    (sample,) = families.status.samples
    return str(sample.labels["status"])


def listed(view: EngineView) -> str:
    """As `monitor top` has it."""
    found = re.search(r"^  (\w+), ", listed_engines([view], "").plain, re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", SCENES)
def test_status_and_findings_agree(name: str) -> None:
    agree(SCENES[name]().watch)


def test_they_agree_at_each_moment() -> None:
    """A request gets nothing, until it is aborted."""
    scene, seen = zero_token(), set()
    for _ in range(60):
        scene.live(0.5)
        seen |= agree(scene.watch)
    scene.lab.abort(scene.lab.scheduler.running[0])
    for _ in range(20):
        scene.live(0.5)
        seen |= agree(scene.watch)
    assert {"serving", "degraded"} <= seen


def test_a_reason_that_the_state_contradicts_is_told_of_the_request() -> None:
    scene = idle_with_one_waiting(Cause.KV_BLOCKS)
    conditions = {one.name: one for one in request_detail(scene.ledger, "r-2", lambda _: ()).conditions}
    assert not conditions["ReasonHolds"].holds
    assert "ReasonHolds" not in {one.name for one in request_detail(scene.ledger, "r-1", lambda _: ()).conditions}
