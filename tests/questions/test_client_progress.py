"""The status of an engine is what its clients get."""

from __future__ import annotations

import pytest

from kvscope.dashboards.web.links import wall_ns
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.test_step_time import StepCost, Timed

VLLM = "qwen/0@127.0.0.1:8000"
BEGAN_NS = 1_795_000_000 * 10**9


def at_work(step_s: float) -> Timed:
    scene = Timed(StepCost(step_s))
    scene.enter(1, 100)
    for _ in range(20):
        scene.run({1: 1})
    return scene


@pytest.mark.parametrize("step_s", [0.02, 1.0, 20.0])
def test_requests_without_a_token_for_long_are_stuck_since_the_last_one(step_s: float) -> None:
    scene = at_work(step_s)
    (served,) = scene.watch.engines()
    assert (served.status, served.status_since) == ("serving", None)
    scene.launch({1: 1})
    scene.hang(step_s)
    assert scene.watch.engines()[0].status == "serving"
    for _ in range(10):
        scene.hang(max(2.0, step_s))
    (stuck,) = scene.watch.engines()
    assert (stuck.status, len(stuck.status_findings)) == ("stuck", 1)
    since_ns, last_token_ns = (wall_ns(at or "", 0) for at in (stuck.status_since, served.at))
    heartbeat_s = max(0.5, step_s / 8) + 0.1  # points are 100 ms apart
    assert 0 <= since_ns - last_token_ns <= heartbeat_s * 1e9


def test_an_engine_without_requests_is_idle_however_long_it_rests() -> None:
    scene = at_work(0.1)
    scene.leave(1)
    scene.say()
    scene.step_number = -1
    for _ in range(20):
        scene.hang(2.0)
    assert scene.watch.engines()[0].status == "idle"


def scraped(*steps: int, every_s: int = 5, awake: bool | None = None, waiting: int = 3) -> Pipeline:
    watch = Pipeline()
    watch.feed(
        Sample(
            VLLM,
            f"scrape {number}",
            BEGAN_NS + number * every_s * 10**9,
            running=0,
            waiting=waiting,
            usage=0.9,
            steps=count,
            awake=awake,
            source="metrics",
        )
        for number, count in enumerate(steps, start=1)
    )
    return watch


def test_a_page_whose_count_of_steps_stands_still_beside_a_queue_is_stuck() -> None:
    watch = scraped(1, 5, 9, 13, *[17] * 12)
    (view,) = watch.engines()
    assert (view.status, view.status_findings) == ("stuck", ["leak.finished-held"])  # nothing runs, and usage is 90 %
    assert view.status_since == scraped(1, 5, 9, 13, 17).engines()[0].at


@pytest.mark.parametrize(
    ("watch", "status"),
    [
        (scraped(1, 5, 9, 13, 17, 17), "serving"),
        (scraped(1, 5, 9, 13, *[17] * 8), "serving"),  # no finding says so yet
        (scraped(1, 5, 9, 9, 13, every_s=60), "degraded"),
        (scraped(1, 5, 9, 13, *[17] * 8, waiting=0), "idle"),
        (scraped(1, 5, 9, 13, *[17] * 8, awake=False), "paused"),
    ],
    ids=["two equal scrapes", "nothing is found yet", "a scrape each minute", "no request", "asleep"],
)
def test_others_are_not(watch: Pipeline, status: str) -> None:
    assert watch.engines()[0].status == status


def lines(*running: int, generated: float = 0.0) -> Pipeline:
    """A log's statistics, ten seconds apart, with three requests waiting."""
    watch = Pipeline()
    watch.feed(
        Sample(
            VLLM,
            f"a.log:{number}",
            BEGAN_NS + number * 10 * 10**9,
            running=count,
            waiting=3,
            usage=0.9,
            prompt_tokens_per_s=0.0,
            generation_tokens_per_s=generated,
            source="log",
        )
        for number, count in enumerate(running, start=1)
    )
    return watch


@pytest.mark.parametrize(
    ("watch", "status", "since"),
    [
        (lines(1, *[0] * 8), "stuck", 2),
        (lines(1, 0, 0), "serving", 0),  # nothing is found yet
        (lines(1, 0), "unknown", 0),
        (lines(1, 1, 1), "serving", 0),  # one prompt may take minutes
        (lines(0, 0, 1), "serving", 0),
        (lines(0, 0, generated=9.0), "serving", 0),
    ],
)
def test_a_log_in_which_nothing_runs_beside_a_queue_serves_nobody(watch: Pipeline, status: str, since: int) -> None:
    (view,) = watch.engines()
    assert view.status == status
    assert wall_ns(view.status_since, 0) == BEGAN_NS + since * 10 * 10**9 if view.status_since else not since
