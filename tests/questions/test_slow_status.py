"""An engine is slow when its clients wait far longer for their first token than they used to, and only then."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec
import pytest

from kvscope.dashboards.web.links import wall_ns
from kvscope.dashboards.web.view import worst_first
from kvscope.monitor.contract.kinds import Status
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.ledger.first_token_pace import FEWEST_IN_SLICE, SLICE_NS, FirstTokenPace
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.questions.request_details import request_detail
from kvscope.monitor.questions.schema import ConditionView, EngineView
from tests.detectors.spoken import Spoken
from tests.web.test_metrics_views import shown

VLLM: Final = "qwen/0@127.0.0.1:8000"
BEGAN_S: Final = 1_795_000_000
BOUNDS: Final = (
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    math.inf,
)
"""Of vLLM's histogram of the time to the first token."""
LEARNED: Final = 1_500.0
"""Seconds of usual load, before what a test is about."""
UNTIL: Final = LEARNED + 900
LONG_ANSWER: Final = 1_000_000
NEVER_SERVED: Final = 1_000_001


class Served(NamedTuple):
    """A request: when its first token came (s after the start), and how long its client had waited for it."""

    at_s: float
    waited_s: float


def usual(rng: random.Random, since_s: float = 0.0, until_s: float = UNTIL, times: float = 1.0) -> Iterator[Served]:
    """One request in four seconds; half wait 0.1 s or less, one in a hundred 0.6 s or longer."""
    at_s = since_s
    while (at_s := at_s + rng.expovariate(0.25)) < until_s:
        yield Served(at_s, times * 0.1 * math.exp(rng.gauss(0, 0.8)))


def overloaded(rng: random.Random) -> list[Served]:
    """Then a queue grows by two seconds in each ten, for ten minutes."""
    late = (Served(one.at_s, 0.2 * (one.at_s - LEARNED)) for one in usual(rng, LEARNED, LEARNED + 600))
    return [*usual(rng, 0, LEARNED), *late, *usual(rng, LEARNED + 600)]


def bursts(rng: random.Random) -> list[Served]:
    """Each ten minutes eighty requests arrive at once and are served within eighty seconds."""
    batches = [Served(began_s + place, place + 0.1) for began_s in range(600, int(UNTIL), 600) for place in range(80)]
    return [*usual(rng), *batches]


def one_burst(rng: random.Random) -> list[Served]:
    """The same, once and as the first."""
    return [*usual(rng), *(Served(LEARNED + place, place + 0.1) for place in range(80))]


def long_prompt(rng: random.Random) -> list[Served]:
    """A prompt takes a minute to compute, and all that arrive in that minute wait for its end."""
    behind = [Served(LEARNED + 60 + place / 10, 60 - 4 * place) for place in range(15)]
    return [*usual(rng, 0, LEARNED), Served(LEARNED + 60, 60.0), *behind, *usual(rng, LEARNED + 62)]


def warm_up(rng: random.Random) -> list[Served]:
    """Kernels are compiled during the first three minutes."""
    return [*usual(rng, 0, 180, times=200), *usual(rng, 180)]


def slow_from_the_start(rng: random.Random) -> list[Served]:
    """Nothing else was ever seen of it."""
    return list(usual(rng, times=200))


def busier(rng: random.Random) -> list[Served]:
    """A larger load doubles the usual time."""
    return [*usual(rng, 0, LEARNED), *usual(rng, LEARNED, times=2.0)]


def rare(rng: random.Random) -> list[Served]:
    """Then one long prompt in two minutes."""
    return [*usual(rng, 0, LEARNED), *(Served(LEARNED + 120 * number, 20.0) for number in range(1, 7))]


def by_stream(served: list[Served]) -> Iterator[tuple[float, Pipeline]]:
    """The engine's own events, beside one long answer and a request that never fits; every 20 s, time and pipeline."""
    scene = Spoken(total=1_000)
    began = scene.clock.monotonic_ns()
    scene.arrive(LONG_ANSWER, [1, 2])
    scene.log.tick()
    scene.log.first_token(LONG_ANSWER)
    scene.log.arrived(NEVER_SERVED, "never", 10_000, 10, 0, 1, 2)
    events = [(max(one.at_s - one.waited_s, 0.0), "arrives", number) for number, one in enumerate(served, start=1)]
    events += [(one.at_s, "is served", number) for number, one in enumerate(served, start=1)]
    events += [(float(second), "", 0) for second in range(20, int(UNTIL), 20)]
    for at_s, what, number in sorted(event for event in events if event[0] < UNTIL):
        scene.clock.sleep(max(at_s - (scene.clock.monotonic_ns() - began) / 1e9, 0))
        scene.log.tick()
        if what == "arrives":
            scene.log.arrived(number, f"r-{number}", 10, 10, 0, 1, 2)
        elif what:
            scene.log.admitted(number, 0)
            scene.log.first_token(number)
            scene.log.finished(number, Status.FINISHED_STOPPED)
        else:
            scene.log.progressed([LONG_ANSWER], [int(at_s)], [int(at_s)])
            scene.say()
            yield at_s, scene.watch


def by_metrics(served: list[Served], every_s: int = 15) -> Iterator[tuple[float, Pipeline]]:
    """The buckets of its page, scraped each 15 s."""
    watch = Pipeline()
    waiting = sorted(served)
    for second in range(every_s, int(UNTIL), every_s):
        counts: Counter[tuple[float, float]] = Counter()
        while waiting and waiting[0].at_s <= second:
            upper = next(bound for bound in BOUNDS if waiting[0].waited_s <= bound)
            counts[max((bound for bound in BOUNDS if bound < upper), default=0.0), upper] += 1
            waiting.pop(0)
        sample = Sample(
            VLLM,
            f"scrape {second}",
            (BEGAN_S + second) * 10**9,
            running=3,
            waiting=2,
            usage=0.3,
            steps=second,
            generation_tokens=50 * second,
            first_token_s=tuple((lower, upper, requests) for (lower, upper), requests in counts.items()),
            source="metrics",
        )
        watch.feed([sample])
        yield second, watch


SIGNALS: Final = {"stream": by_stream, "metrics": by_metrics}


def slow_times(looks: Iterator[tuple[float, Pipeline]]) -> tuple[list[float], EngineView | None, Pipeline]:
    """At which looks the engine was slow, how the first of them showed it, and the pipeline at the end."""
    found: list[float] = []
    first = None
    for at_s, watch in looks:
        (view,) = watch.engines()
        assert view.status in ("slow", "degraded", "serving", "idle", "stuck"), view.status
        assert bool(view.status_findings) == (view.status in ("slow", "degraded", "stuck"))
        assert view.slow is not None or view.status != "slow"
        if view.slow is not None:
            found.append(at_s)
            first = first or view
    return found, first, watch


@pytest.mark.parametrize("signal", SIGNALS)
def test_an_engine_whose_clients_wait_far_longer_is_slow_until_they_no_longer_do(signal: str) -> None:
    found, first, watch = slow_times(SIGNALS[signal](overloaded(random.Random(1))))
    assert first is not None
    assert first.slow is not None
    assert LEARNED + 200 <= found[0] <= LEARNED + 420
    assert LEARNED + 500 <= found[-1] <= LEARNED + 820
    assert first.slow.p50_s > 10
    assert 0.2 < first.slow.usual_p95_s < 1.5
    assert first.slow.usual_of > 200
    since_s = found[0] - (wall_ns(first.at or "", 0) - wall_ns(first.slow.since or "", 0)) / 1e9
    assert LEARNED - 100 <= since_s <= LEARNED + 200
    (then,) = watch.engines(first.at or "")
    assert then.slow == first.slow


@pytest.mark.parametrize("signal", [pytest.param("stream", marks=pytest.mark.slow), "metrics"])
@pytest.mark.parametrize(
    "load",
    [usual, bursts, one_burst, long_prompt, warm_up, slow_from_the_start, busier, rare],
    ids=lambda load: load.__name__,
)
def test_others_are_not(load: Callable[[random.Random], Iterator[Served] | list[Served]], signal: str) -> None:
    found, _, _ = slow_times(SIGNALS[signal](list(load(random.Random(2)))))
    assert found == []


def test_requests_that_have_no_token_yet_count_by_how_long_they_wait() -> None:
    """Nothing is admitted any more, and one long answer goes on."""
    rng = random.Random(3)
    unserved = [Served(one.at_s + UNTIL, UNTIL) for one in usual(rng, LEARNED)]
    found, _, _ = slow_times(by_stream([*usual(rng, 0, LEARNED), *unserved]))
    assert found
    assert found[0] <= LEARNED + 420


@pytest.mark.parametrize("every_s", [5, 30, 60])
def test_scrapes_of_any_usual_interval_show_it(every_s: int) -> None:
    found, _, _ = slow_times(by_metrics(overloaded(random.Random(1)), every_s))
    assert found


def test_the_overview_leads_with_the_slow_engine_and_what_it_is_compared_with() -> None:
    for _, watch in by_metrics(overloaded(random.Random(1))):
        (view,) = watch.engines()
        if view.slow is not None:
            break
    text = shown(watch, "/")
    assert f"{VLLM}, since " in text
    assert "of its requests wait" in text
    assert "used to wait" in text
    assert json.dumps("status serving") in text  # no finding says more
    other = msgspec.structs.replace(view, engine="a", status="serving", slow=None)
    assert worst_first([other, view]) == [view, other]


@pytest.mark.parametrize(("requests", "learned"), [(FEWEST_IN_SLICE, True), (FEWEST_IN_SLICE - 1, False)])
def test_it_is_learned_from_a_slice_of_few_requests_but_not_of_fewer(requests: int, learned: bool) -> None:
    pace = FirstTokenPace()
    for number in range(20):
        pace.sampled(1 + number * SLICE_NS, [(0.1, 0.25, requests)])
    for number in range(20, 24):
        pace.sampled(1 + number * SLICE_NS, [(20.0, 40.0, 10)])
    assert bool(pace.slow) is learned


def test_of_a_request_it_is_told_beside_what_is_usual() -> None:
    """Nothing is admitted any more. One that was served before waited as usual."""
    rng = random.Random(3)
    served = list(usual(rng, 0, LEARNED))
    unserved = [Served(one.at_s + UNTIL, UNTIL) for one in usual(rng, LEARNED)]
    *_, (_, watch) = by_stream([*served, *unserved])
    (ledger,) = watch.fleet.engines.values()

    def wait_of(number: int) -> ConditionView:
        conditions = request_detail(ledger, f"r-{number}", lambda _: ()).conditions
        return next(one for one in conditions if one.name == "UsualWait")

    assert wait_of(len(served)).holds
    assert not wait_of(len(served) + 1).holds
    assert "earlier requests usually waited" in wait_of(len(served) + 1).reason
