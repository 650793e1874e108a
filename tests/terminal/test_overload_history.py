"""An overload in the history of a real Prometheus server that scrapes every 15 or 60 seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvscope.lab.paper_engine import Moment, every
from kvscope.lab.recorded_pages import COLUMNS, Row
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.terminal.report import examine
from tests.dashboards.programs import program
from tests.detectors.test_queue_metrics import OVERLOAD, served, value
from tests.terminal.by_source import remembered


def as_rows(moments: Sequence[Moment]) -> list[Row]:
    """The figures of a paper engine as those of a recording."""
    return [
        dict.fromkeys(COLUMNS, 0.0)
        | {
            "t": moment.t,
            "running": moment.running,
            "waiting": moment.waiting,
            "wait_capacity": moment.waiting,
            "kv_usage": moment.usage,
            "prompt_tokens": moment.prompt_tokens,
            "gen_tokens": moment.generation_tokens,
            "ok_stop": moment.finished,
            "iter_count": moment.steps,
        }
        for moment in moments
    ]


@pytest.mark.slow
def test_an_overload_is_found_in_a_prometheus_server(tmp_path: Path) -> None:
    server, tool = program("prometheus", "prometheus"), program("promtool", "prometheus")
    series = {
        f"overload-{seconds}:8000": as_rows(every(served(seconds, 2.6, 900), seconds)) for seconds in (15, 30, 60)
    }
    series["calm:8000"] = as_rows(every(served(7, 1.0, 900), 15))
    with remembered(series, server, tool, tmp_path) as url:
        findings = examine([], Settings(), prometheus=[url]).findings
    named = {finding.engine: finding for finding in findings if finding.code == OVERLOAD}
    assert len(named) == 3
    assert all("overload-" in engine for engine in named)
    for finding in named.values():
        assert finding.verdict == "likely"
        assert value(finding, "arrival_rate_low") < 2.6 < value(finding, "arrival_rate_high")
        assert value(finding, "completion_rate_high") < 2.6
