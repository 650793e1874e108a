"""When the pool will be full: in the headline, on the timeline and as a metric, and nothing of it where all return."""

from __future__ import annotations

import random
import re

import pytest

from kvscope.dashboards.web.views import overview_view, timeline_view
from kvscope.monitor.outputs.prometheus.service_metrics import FindingFamilies
from tests.detectors.scenes import Watched
from tests.web.parts import ENGINE
from tests.web.test_states import at, text

BLOCKS = 501
LOST = 5
"""Blocks of an aborted request: 18 tokens, of which 4 are computed in steps of their own."""
EVERY_S = 2.0


def an_hour_and_more(*faults: str, minutes: int) -> Watched:
    """About each minute a request is aborted, whose blocks a fault may keep, among some that end well."""
    rng = random.Random(3)
    scene = Watched(total=BLOCKS, faults=faults)
    for _ in range(minutes):
        request = scene.lab.arrive(14, max_tokens=20)
        scene.lab.arrive(rng.randint(4, 40), max_tokens=3)
        scene.steps(4, EVERY_S)
        scene.lab.abort(request)
        scene.live(60 - 4 * EVERY_S, EVERY_S)
    return scene


@pytest.mark.parametrize("minutes", [50, 75])
def test_a_leak_of_one_percent_a_minute_is_forecast_within_a_tenth(minutes: int) -> None:
    scene = an_hour_and_more("leak.unaccounted", minutes=minutes)
    left_s = ((BLOCKS - 1) / LOST - minutes) * 60
    assert scene.watch.fleet.engines[ENGINE].balance().unaccounted == LOST * minutes
    (report,) = (each for each in scene.watch.findings("firing") if each.code == "leak.unaccounted")
    assert report.harm is not None
    assert report.harm.forecast is not None
    assert report.harm.forecast.full_in_s == pytest.approx(left_s, rel=0.1)
    headline = text(overview_view.view(scene.watch, at(scene.watch, "/")), "head")
    (words,) = re.findall(r"its pool is full in (\d+ min) \(9 in 10: ", headline)
    assert f"Pool full in {words}" in text(timeline_view.view(scene.watch, at(scene.watch, "/engine")), "summary")
    families = FindingFamilies()
    families.add(scene.watch.lifecycle)
    bounds = {sample.labels["bound"]: sample.value for sample in families.pool_full.samples}
    assert bounds["earliest"] < bounds["estimate"] == report.harm.forecast.full_in_s < bounds["latest"]


def test_an_engine_whose_blocks_return_has_no_forecast() -> None:
    scene = an_hour_and_more(minutes=20)
    assert "full in" not in text(overview_view.view(scene.watch, at(scene.watch, "/")), "head")
    assert "Pool full in" not in text(timeline_view.view(scene.watch, at(scene.watch, "/engine")), "summary")
    families = FindingFamilies()
    families.add(scene.watch.lifecycle)
    assert not families.pool_full.samples
