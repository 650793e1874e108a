"""Log lines of no token with requests running: a long prefill that ends by itself, or a standstill of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import msgspec
import pytest

from kvscope.lab.paper_engine import BEGAN, Moment, as_metrics, log_lines
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.engine_log import Log

ENGINE_STALLED = "stuck.engine-stalled"
HANGS = "The server hangs and never responds again."


def found(moments: Sequence[Moment], *stated: str, after: Sequence[str] = ()) -> list[FindingReport]:
    """All findings above information, from the log of these moments and what a person wrote above it; `after`: lines
    at its end.
    """
    watch = Pipeline()
    watch.feed(Log("paper.log", BEGAN.replace(day=BEGAN.day + 1)).records([*stated, *log_lines(moments), *after]))
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


def chats(lines: int, usage_each: float = 0.01) -> list[Moment]:
    """Four chats that are answered; each line of 10 s has tokens, and usage rises by so much."""
    return [Moment(10.0 * n, 4, 0, 0, 0.2 + usage_each * n, 400.0, 1200.0 * n, 0, 0) for n in range(1, lines + 1)]


def pause(after: Sequence[Moment], lines: int, running: int = 4, usage_each: float = 0.0) -> list[Moment]:
    """Lines without a token after others."""
    last = after[-1]
    return [
        last._replace(t=last.t + 10.0 * n, running=running, usage=last.usage + usage_each * n)
        for n in range(1, lines + 1)
    ]


def first_prompt(lines: int) -> list[Moment]:
    """One prompt computed in chunks on a slow host, in a pool so large that usage stays at 0.0 %."""
    return [Moment(10.0 * n, 1, 0, 0, 0.0, 0.0, 0.0, 0, 0) for n in range(1, lines + 1)]


@pytest.mark.parametrize("lines", [4, 8, 30])
def test_a_first_prompt_in_a_large_pool_is_never_likely_a_stall(lines: int) -> None:
    assert {finding.verdict for finding in found(first_prompt(lines))} <= {"cannot-tell"}


def test_what_a_long_prefill_looks_like_advises_no_restart() -> None:
    (finding,) = found(first_prompt(8))
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "cannot-tell")
    assert "long prompt" in finding.explanation
    assert not any("restart" in step.lower() for step in finding.do_now)


def test_a_prefill_in_a_pool_where_tokens_move_no_usage_is_not_likely_a_stall() -> None:
    before = chats(6, usage_each=0.0)
    assert {finding.verdict for finding in found([*before, *pause(before, 9)])} == {"cannot-tell"}


def test_a_prompt_admitted_after_the_last_token_may_take_steps_of_half_a_minute() -> None:
    before = chats(6)
    assert found([*before, *pause(before, 4, running=5)]) == []
    assert [finding.code for finding in found([*before, *pause(before, 4)])] == [ENGINE_STALLED]


def test_a_prefill_whose_chunks_take_blocks_is_no_stall() -> None:
    before = chats(6)
    assert found([*before, *pause(before, 12, running=5, usage_each=0.002)]) == []


def test_requests_that_had_tokens_and_stop_are_likely_stalled() -> None:
    before = chats(6)
    (finding,) = found([*before, *pause(before, 3)])
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")


def test_lines_of_an_idle_engine_are_no_pause_that_it_came_out_of() -> None:
    idle = [Moment(10.0 * n, 0, 0, 0, 0.0, 400.0, 0.0, 0, 0) for n in range(1, 31)]
    chat = [moment._replace(t=moment.t + 300.0) for moment in chats(6)]
    assert [finding.code for finding in found([*idle, *chat, *pause(chat, 4)])] == [ENGINE_STALLED]


def test_a_request_admitted_into_a_stall_does_not_hide_it() -> None:
    before = chats(6)
    (finding,) = found([*before, *pause(before, 8, running=5)])
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")


def test_two_lines_and_a_person_who_reports_a_hang_are_likely_a_stall() -> None:
    (finding,) = found(first_prompt(2), HANGS)
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")


def test_requests_that_stop_in_a_pool_in_which_they_show_as_0_are_found_as_soon() -> None:
    before = [moment._replace(usage=0.0) for moment in chats(6)]
    assert [finding.code for finding in found([*before, *pause(before, 4)])] == [ENGINE_STALLED]


def test_blocks_freed_before_a_pause_may_have_let_in_a_long_prompt() -> None:
    before = chats(6)
    freed = [moment._replace(usage=0.0) for moment in pause(before, 4)]
    assert found([*before, *freed]) == []


def test_an_engine_that_served_requests_since_its_start_and_ends_is_dead() -> None:
    """Its start was logged, and not that it was complete: the lines of statistics show that."""
    start = "INFO 11-20 11:59:00 [api_server.py:1900] vLLM API server version 0.11.0"
    ray = "(EngineCore pid=5) ERROR 11-20 12:01:00 [ray_executor_v2.py:523] RayWorkerProc rank=3 died unexpectedly,"
    died = f"{ray} shutting down executor."

    served, at_its_start = found(chats(3), start, after=[died]), found([], start, after=[died])
    for each in (served, found([], after=[died])):
        assert [(finding.code, finding.verdict) for finding in each] == [("stuck.engine-dead", "likely")]
    assert {finding.verdict for finding in at_its_start} == {"cannot-tell"}


def worker_waits(*minutes: int) -> list[str]:
    """A worker's lines that it has had nothing from the engine for a minute, so many minutes after noon."""
    message = "No available shared memory broadcast block found in 60 seconds."
    return [f"INFO {BEGAN:%m-%d} 12:{minute:02}:00 [shm_broadcast.py:705] {message}" for minute in minutes]


@pytest.mark.parametrize("goes_on", [False, True])
def test_workers_that_waited_before_tokens_were_counted_again_show_no_stall(goes_on: bool) -> None:
    """One long compilation, say: what was computed since shows that the engine moves."""
    later = [moment._replace(t=moment.t + 300.0) for moment in chats(3)]
    stalls = found(later, *worker_waits(1, 2)) if goes_on else found(later, after=worker_waits(9, 10))
    assert [finding.code for finding in stalls] == ([] if goes_on else [ENGINE_STALLED])


# -------------------------------------------------------------------- metrics, scraped seldom


def stopped(every_s: int, steps_each: int, before: int, still: int) -> list[Moment]:
    """A page scraped so often: so many steps between two scrapes at first, and none in the end."""
    return [
        Moment(float(every_s * n), 4, 0, 0, 0.3, 500.0, 4.0 * steps, steps, 0)
        for n in range(1, before + still + 1)
        for steps in [steps_each * min(n, before)]
    ]


def codes_in(moments: Sequence[Moment]) -> list[str]:
    watch = Pipeline()
    watch.feed(as_metrics(moments))
    watch.settle()
    return [finding.code for finding in watch.findings() if finding.severity != "info"]


@pytest.mark.parametrize("every_s", [5, 15, 30, 60])
def test_a_stall_is_found_soon_after_many_steps_between_two_scrapes(every_s: int) -> None:
    assert codes_in(stopped(every_s, 40, before=2, still=10)) == [ENGINE_STALLED]


@pytest.mark.parametrize("every_s", [5, 15, 30])
def test_the_first_step_that_is_watched_may_take_minutes(every_s: int) -> None:
    """No step was seen to end, so that nothing shows how long one takes here."""
    assert codes_in(stopped(every_s, 1, before=1, still=150 // every_s)) == []


# -------------------------------------------------------------------- workers that do not come back

WORKER_WAIT = (
    "(EngineCore pid=7) INFO {} [shm_broadcast.py:871] No available shared memory broadcast block found in 60 seconds."
)


def taken_in(running: int = 0, waiting: int = 12, generated: float = 0.0) -> list[Moment]:
    """Chats, and then a line of requests that came, as a step takes them in."""
    before = chats(6)
    last = before[-1]
    tokens = last.generation_tokens + generated
    return [*before, last._replace(t=last.t + 10.0, running=running, waiting=waiting, generation_tokens=tokens)]


def worker_wait(after: Sequence[Moment], seconds: float = 62.0) -> str:
    return WORKER_WAIT.format(f"{BEGAN + timedelta(seconds=after[-1].t + seconds):%m-%d %H:%M:%S}")


def test_a_step_that_took_in_all_that_waited_and_never_came_back_is_a_stall() -> None:
    moments = taken_in()
    (finding,) = found(moments, after=[worker_wait(moments)])
    assert (finding.code, finding.verdict) == (ENGINE_STALLED, "likely")
    assert "with 0 requests running and 12 waiting" in finding.explanation


@pytest.mark.parametrize(
    "moments", [taken_in(waiting=0), taken_in(generated=500.0), chats(7)], ids=["none waits", "a token", "they run"]
)
def test_workers_that_are_waited_for_once_are_no_stall_beside_an_idle_or_moving_engine(moments: list[Moment]) -> None:
    assert ENGINE_STALLED not in {finding.code for finding in found(moments, after=[worker_wait(moments)])}


def test_workers_that_were_waited_for_before_the_last_line_are_no_stall() -> None:
    moments = taken_in()
    lines = log_lines(moments)
    watch = Pipeline()
    text = [*lines[:-1], worker_wait(moments, -5.0), lines[-1]]
    watch.feed(Log("paper.log", BEGAN.replace(day=BEGAN.day + 1)).records(text))
    watch.settle()
    assert [finding for finding in watch.findings() if finding.severity != "info"] == []


# -------------------------------------------------------------------- nothing runs, and all wait for KV from elsewhere


def fetches(lasts_s: int, **figures: int | None) -> list[FindingReport]:
    """What pages show, 5 s apart, of requests that all wait for something other than room."""
    moments = [*chats(6), *(taken_in()[-1]._replace(t=70.0 + 5.0 * n, deferred=12) for n in range(lasts_s // 5))]
    known = {"external_queries": 9_000, "finished": 40, "generation_tokens": 7_200} | figures
    watch = Pipeline()
    watch.feed([msgspec.structs.replace(sample, **known) for sample in as_metrics(moments)])
    watch.settle()
    return [finding for finding in watch.findings() if finding.severity != "info"]


def test_an_engine_that_looks_kv_up_elsewhere_and_gets_no_further_is_found_by_its_page() -> None:
    (finding,) = fetches(90)
    assert (finding.code, finding.verdict) == ("stuck.remote-load", "likely")
    assert "grammar" in finding.missing


def test_no_fetch_is_found_in_an_engine_that_fetches_nothing_or_has_waited_briefly() -> None:
    assert [finding.code for finding in fetches(90, external_queries=None)] == []
    assert [finding.code for finding in fetches(90, external_queries=0)] == []
    assert [finding.code for finding in fetches(30)] == []
