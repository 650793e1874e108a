"""Logs that go on after their last line of statistics: an engine that stands still, or one that has nothing to do."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvscope.lab.paper_engine import BEGAN, Moment, log_lines
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log
from tests.detectors.test_standstill import ENGINE_STALLED, chats, pause

PROBE = '(APIServer pid=1) INFO:     192.0.2.1:4000 - "GET /health HTTP/1.1" 200 OK'
REQUEST = '(APIServer pid=1) INFO:     192.0.2.1:4001 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
LOGGED_REQUEST = "INFO 11-20 12:01:20 [logger.py:43] Received request chatcmpl-1: prompt: None, params: None"
BUSY = chats(6)
STILL = [*BUSY, *pause(BUSY, 1)]
"""vLLM since 0.10.2 logs one line without a token, and then none."""
ENDS_AT_S = 70


def probed(moments: Sequence[Moment]) -> list[str]:
    """The lines of statistics, a probe after each."""
    return [line for stats in log_lines(moments, while_still=False) for line in (stats, PROBE)]


def at(second: int, message: str) -> str:
    """A line that a container's runtime gave a time, seconds after the engine began."""
    return f"2026-11-20T12:{second // 60:02}:{second % 60:02}Z {message}"


def found(lines: Sequence[str]) -> list[FindingReport]:
    """All findings above information."""
    watch = Pipeline()
    watch.feed(Log("a.log", BEGAN.replace(day=BEGAN.day + 1)).records(lines))
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


@pytest.mark.parametrize("request_line", [REQUEST, LOGGED_REQUEST])
def test_requests_that_come_and_get_no_token_are_likely_a_stall(request_line: str) -> None:
    (finding,) = found([*probed(STILL), request_line, request_line, *[PROBE] * 8])
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")
    assert "2 requests came since" in finding.explanation
    evidence = {one.name: one for one in finding.evidence}
    assert evidence["requests_received_since"].position == "a.log:15"
    assert evidence["log_goes_on_for"].value == pytest.approx(80, abs=15)


def test_lines_with_times_show_it_without_a_probe() -> None:
    lines = [*log_lines(STILL, while_still=False), *(at(ENDS_AT_S + n, REQUEST) for n in (5, 40, 70))]
    (finding,) = found(lines)
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")
    assert found(lines[:-1]) == []  # 40 s: a step may take as long


@pytest.mark.parametrize("requests", [0, 1])
def test_probes_alone_are_a_hypothesis_that_names_clients_that_gave_up(requests: int) -> None:
    (finding,) = found([*probed(STILL), *[REQUEST] * requests, *[PROBE] * 8])
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "cannot-tell")
    assert ("given up" if not requests else "A long prompt") in finding.explanation
    assert not any("restart" in step.lower() for step in finding.do_now)


def test_requests_that_came_just_now_show_no_stall() -> None:
    lines = [*probed(STILL), *[PROBE] * 8, REQUEST, REQUEST, PROBE]
    assert [finding.verdict for finding in found(lines)] == ["cannot-tell"]


@pytest.mark.parametrize(("before", "running"), [(1, 1), (4, 5)])
def test_a_long_prompt_before_which_others_wait_is_not_likely_a_stall(before: int, running: int) -> None:
    """Of a million tokens: its chunks take all of each step for minutes, or one step computes it without chunks."""
    chat = [moment._replace(running=before) for moment in BUSY]
    lines = [*probed([*chat, *pause(chat, 1, running=running)]), REQUEST, REQUEST, *[PROBE] * 20]
    assert {finding.verdict for finding in found(lines)} == {"cannot-tell"}


def test_an_engine_whose_first_prompt_is_long_is_not_likely_stalled() -> None:
    first = [Moment(10.0 * n, 1, 0, 0, 0.01, 10.0, 0.0, 0, 0) for n in (1, 2)]
    lines = [*probed(first), REQUEST, REQUEST, *[PROBE] * 8]
    assert {finding.verdict for finding in found(lines)} <= {"cannot-tell"}


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([*BUSY, *pause(BUSY, 1, running=0)], id="idle"),
        pytest.param(BUSY, id="statistics end while tokens are computed: rotated, cut or filtered"),
    ],
)
def test_other_logs_go_on_without_statistics_too(moments: Sequence[Moment]) -> None:
    assert found([*probed(moments), REQUEST, REQUEST, *[PROBE] * 20]) == []


def test_a_log_that_ends_with_its_statistics_shows_no_stall() -> None:
    assert found(probed(STILL)) == []
    assert found(log_lines(STILL, while_still=False)) == []


def test_an_engine_that_was_as_silent_before_and_went_on_is_not_stalled() -> None:
    before = pause(BUSY, 1)
    after = [moment._replace(t=moment.t + 150, generation_tokens=moment.generation_tokens + 9000) for moment in BUSY]
    lines = [
        *probed([*BUSY, *before]),
        *[PROBE] * 9,
        *probed([*after, *pause(after, 1)]),
        REQUEST,
        REQUEST,
        *[PROBE] * 12,
    ]
    assert found(lines) == []
    assert [finding.verdict for finding in found([*lines, *[PROBE] * 20])] == ["likely"]


@pytest.mark.parametrize(
    "ended",
    [
        "(APIServer pid=1) INFO 11-20 12:01:15 [launcher.py:80] SIGTERM received, shutting down.",
        "(APIServer pid=7) INFO 11-20 12:01:15 [api_server.py:1900] vLLM API server version 0.11.0",
        "SIGTERM received",
    ],
)
def test_what_follows_in_another_run_is_not_counted(ended: str) -> None:
    assert found([*probed(STILL), ended, REQUEST, REQUEST, *[PROBE] * 20, at(900, PROBE)]) == []


def test_an_engine_that_was_halted_by_its_operator_is_not_stalled() -> None:
    halt = '(APIServer pid=1) INFO:     192.0.2.1:4002 - "POST /pause?mode=keep HTTP/1.1" 200 OK'
    resume = halt.replace("pause?mode=keep", "resume")
    tail = [REQUEST, REQUEST, *[PROBE] * 20]
    assert found([*probed(STILL), halt, *tail]) == []
    assert found([*probed(BUSY), halt, *probed(STILL)[-2:], *tail]) == []
    assert [finding.verdict for finding in found([*probed(STILL), halt, resume, *tail])] == ["likely"]


def test_probes_of_a_pace_that_no_statistics_show_measure_no_time() -> None:
    assert found([*log_lines(STILL, while_still=False), REQUEST, REQUEST, *[PROBE] * 100]) == []


def test_time_between_runs_does_not_slow_the_probes_down() -> None:
    start = "(APIServer pid=7) INFO 11-20 13:00:00 [api_server.py:1900] vLLM API server version 0.11.0"
    later = [moment._replace(t=moment.t + 3700) for moment in STILL]
    lines = [*probed(BUSY), start, *probed(later), REQUEST, REQUEST]
    assert found([*lines, *[PROBE] * 2]) == []
    assert [finding.verdict for finding in found([*lines, *[PROBE] * 8])] == ["likely"]


def test_ranks_that_log_at_the_same_time_share_the_probes() -> None:
    ranks = [
        line
        for stats in log_lines(STILL, while_still=False)
        for line in (stats, PROBE, stats.replace("Engine 000", "Engine 001"))
    ]
    evidence = {one.name: one.value for finding in found([*ranks, *[PROBE] * 8]) for one in finding.evidence}
    assert evidence["log_goes_on_for"] == pytest.approx(80, abs=15)
