"""What a plan takes from the text of a log: the release of vLLM that it is made for (written/planned_settings.py)."""

from __future__ import annotations

import pytest

from kvscope.lab.paper_engine import BEGAN, Moment, log_lines
from kvscope.monitor.detectors.written.planned_settings import DEFAULT_RELEASE, release_of
from kvscope.monitor.detectors.written.written_view import WrittenView
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log


@pytest.mark.parametrize(
    ("line", "release"),
    [
        ("INFO 11-20 11:59:00 [api_server.py:1900] vLLM API server version 0.11.0", (0, 11)),
        ("INFO 11-20 11:59:00 [core.py:58] Initializing a V1 LLM engine (v0.9.2rc2.dev1) with config: m", (0, 9)),
        ("INFO 11-20 11:59:00 [launcher.py:1] GET /health", DEFAULT_RELEASE),
    ],
)
def test_a_plan_is_for_the_release_that_the_log_names(line: str, release: tuple[int, int]) -> None:
    watch = Pipeline()
    lines = [line, *log_lines([Moment(1.0, 2, 0, 0, 0.3, 5000.0, 50.0, 50, 3)])]
    watch.feed(Log("paper.log", BEGAN.replace(day=BEGAN.day + 1)).records(lines))
    (ledger,) = watch.fleet.engines.values()
    assert release_of(WrittenView(ledger)) == release
