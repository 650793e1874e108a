"""The questions of an engineer on call, each answered from the overview in at most two clicks.

A click follows a link that the page has, in a view or in the bar above it.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import pytest

from kvscope.dashboards.web import header
from kvscope.dashboards.web.links import place_of, wall_ns
from kvscope.dashboards.web.view import Here
from kvscope.dashboards.web.view_registry import PATHS
from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.test_usage_forecast import plain_vllm
from tests.web.parts import ENGINE
from tests.web.test_answer_links import links
from tests.web.test_states import texts

DAY_S: Final = 86_400
MOST_CLICKS: Final = 2
NOT_FROM_METRICS: Final = frozenset(("who holds the memory", "which request", "is the cache working, for whom"))
"""Metrics name no holder and no request, and they count hits as a whole."""


class OnCallQuestion(NamedTuple):
    """`clicks` match the addresses that are followed; `stream` and `metrics`: what the last page shows. `scene`: of the
    engine with metrics only.
    """

    text: str
    clicks: tuple[str, ...]
    stream: str
    metrics: str
    scene: str = "metrics"


AT_ONCE: Final = "of each length that the pool holds at once"
YESTERDAY: Final = r"tokens generated (\d|none)"
QUESTIONS: Final = (
    OnCallQuestion("who holds the memory", (), r"requests still hold \d+ blocks", ""),
    OnCallQuestion("why", (), r"the KV connector asked to keep its blocks", "no step has ended"),
    OnCallQuestion("since when", (), r"since \d\d:\d\d:\d\d UTC", r"since \d\d:\d\d:\d\d UTC"),
    OnCallQuestion("which request", (), r"\d+ requests r-\d+", ""),
    OnCallQuestion("what do I do now", (), "Do now", "Do now"),
    OnCallQuestion("was it like this yesterday", ("/compare", r"/compare\?.*with_from="), YESTERDAY, YESTERDAY),
    OnCallQuestion("which engine is worst", (), rf"^\S+: (the pool is|finished requests)|^{ENGINE}", "^qwen"),
    OnCallQuestion("what changed after my deploy", ("/engine", "/configuration"), r"num_gpu_blocks: 65 → 41", "Starts"),
    OnCallQuestion(
        "would a larger pool help",
        ("/plan",),
        "of each length that the pool holds at once",
        "of each length that the pool holds at once",
    ),
    OnCallQuestion("is the cache working, for whom", ("/prefixes",), r"Hit rate [\d.]+ %.* Requests", ""),
    OnCallQuestion(
        "how long until it is full", ("/engine",), r"full in", r"Pool full in \d+ (h|min)", "metrics of a leak"
    ),
    OnCallQuestion("is it serving", (), rf"{ENGINE}", "has computed no token since"),
)


def by_stream() -> Pipeline:
    """An engine that leaks, after a restart with a smaller pool."""
    clock = VirtualClock()
    watch = Pipeline()
    for total, faults in ((65, []), (41, ["leak.finished-held:every=8"])):
        lab = Lab(total=total, clock=clock, connector_share=1.0, faults=faults)
        for _ in range(50):
            lab.arrive(8, max_tokens=4)
            lab.run_until_idle()
            clock.sleep(8)
            lab.heartbeat()
            lab.flush()
        watch.feed(lab.frames)
        clock.sleep(DAY_S if total == 65 else 0)
    watch.settle()
    return watch


def by_metrics() -> Pipeline:
    watch = Pipeline()
    engine = "qwen/0@127.0.0.1:8000"
    facts = (("num_gpu_blocks", 1_001), ("block_size", 16), ("model", "qwen"), ("exposition", "vllm"))
    watch.feed([Fact(engine, "scrape 1", name, value) for name, value in facts])
    for number in [*range(-DAY_S // 5 - 140, -DAY_S // 5), *range(60)]:
        moves = min(max(number, 0), 20)
        one = Sample(
            engine,
            f"scrape {number + 1}",
            (1_795_000_000 + 5 * number) * 10**9,
            running=3,
            waiting=9,
            deferred=0,
            usage=0.3,
            steps=moves,
            generation_tokens=50 * moves,
            measured_requests=moves,
            request_prompt_tokens=100 * moves,
            request_output_tokens=20 * moves,
            restarted=number == 0,
            source="metrics",
        )
        watch.feed([one])
    return watch


def page(watch: Pipeline, address: str) -> tuple[str, list[str]]:
    """What a page shows, and where its links lead."""
    (engine,) = watch.engines()
    place = place_of(address)._replace(engine=engine.engine)
    here = Here(place, place.window(wall_ns(engine.at or "", 0)), engine, [engine])
    view = PATHS[place.view].make(watch, here)
    parts: list[Any] = [*view.sections.values(), view.aside]
    return re.sub(r"\s+", " ", " ".join(texts(parts))).strip(), links([*parts, *header.header_bar(here)])


@pytest.fixture(scope="module")
def scenes() -> dict[str, Pipeline]:
    leaking, _ = plain_vllm(30, lambda minute: 5.0 * minute, seed=1)
    return {"stream": by_stream(), "metrics": by_metrics(), "metrics of a leak": leaking}


@pytest.mark.parametrize("signal", ["stream", "metrics"])
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_a_question_is_answered_in_two_clicks(
    scenes: dict[str, Pipeline], question: OnCallQuestion, signal: str
) -> None:
    if signal == "metrics" and question.text in NOT_FROM_METRICS:
        pytest.skip("named in advance: not in metrics")
    watch = scenes[question.scene if signal == "metrics" else signal]
    assert len(question.clicks) <= MOST_CLICKS
    shown, leads = page(watch, "/")
    for click in question.clicks:
        there = next((link for link in leads if re.match(click, link)), None)
        assert there is not None, (click, leads)
        shown, leads = page(watch, there)
    assert re.search(question.stream if signal == "stream" else question.metrics, shown), shown[:1500]


def test_those_that_metrics_leave_open_are_four_at_most() -> None:
    assert len(NOT_FROM_METRICS) <= 4
    assert {question.text for question in QUESTIONS} >= NOT_FROM_METRICS
