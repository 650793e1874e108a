"""Figures that no engine has, on a page or in a log: not exposed, never shown as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.questions.observe import observe
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.exposition import ExposedFigures, put_figure

RUNNING, USAGE = "vllm:num_requests_running", "vllm:kv_cache_usage_perc"
LOG = Path(__file__).parents[1] / "data" / "seed-002.log"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (RUNNING, -3.0),
        (RUNNING, 1e308),
        (RUNNING, float("nan")),
        (RUNNING, float("inf")),
        (USAGE, -7.0),
        (USAGE, 1.5),
        ("sglang:cache_hit_rate", -1.0),
    ],
)
def test_a_value_that_no_engine_has_is_not_exposed(name: str, value: float) -> None:
    figures: ExposedFigures = {}
    put_figure(figures, name, {}, value)
    assert not figures


@pytest.mark.parametrize(("name", "value"), [(RUNNING, 0.0), (RUNNING, 4000.0), (USAGE, 0.0), (USAGE, 1.0)])
def test_a_value_that_an_engine_has_is(name: str, value: float) -> None:
    figures: ExposedFigures = {}
    put_figure(figures, name, {}, value)
    assert list(figures.values()) == [value]


def test_a_log_of_a_device_without_memory(tmp_path: Path) -> None:
    path = tmp_path / "seed.log"
    text = LOG.read_text()
    changed = re.sub(r"Free memory on device \([\d.]+/[\d.]+ GiB\)", "Free memory on device (0.0/0.0 GiB)", text)
    assert changed != text
    path.write_text(changed)
    query = observe(str(path), Settings()).query
    assert isinstance(query, Pipeline)
    assert not query.supervisor.failures()
