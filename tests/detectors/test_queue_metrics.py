"""Queues and hit rates by metrics alone: sizing.overload, stuck.head-of-line and collapse.prefix-hits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvscope.lab.paper_engine import BEGAN, Moment, PaperEngine, as_log, as_metrics, every
from kvscope.monitor.base.text import timestamp
from kvscope.monitor.contract.samples import Fact, ReportedEvent, Sample
from kvscope.monitor.detectors.collapse.prefix_hits import hit_cells, hit_rate_drop
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.registry import CATALOGUE
from kvscope.monitor.detectors.sample_math import QueueCourse
from kvscope.monitor.detectors.stuck.head_of_line import unadmitted_queue
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.exposition import ExposedEngine, Sampler, put_figure
from tests.detectors.spoken import ENGINE, Spoken

OVERLOAD, HEAD_OF_LINE, PREFIX_HITS = "sizing.overload", "stuck.head-of-line", "collapse.prefix-hits"
INTERVALS_S = (5, 15, 30, 60)
Records = Sequence[Sample | Fact | ReportedEvent]


def found(code: str, records: Records, *, information: bool = False) -> FindingReport | None:
    """The finding of that code, above information or at all, if it fired at any time."""
    watch = Pipeline()
    watch.feed(records)
    watch.settle()
    named = [each for each in watch.findings() if each.code == code and (information or each.severity != "info")]
    return named[0] if named else None


def value(finding: FindingReport, name: str) -> float:
    return next(float(each.value) for each in finding.evidence if each.name == name)


def first_found_s(code: str, records: Records) -> float | None:
    """When it fired first, in seconds of the paper engine."""
    watch = Pipeline()
    for record in records:
        watch.feed([record])
        for finding, to, at_ns in watch.take_transitions():
            if to == "firing" and finding.judgement.code == code:
                return at_ns / 1e9 - BEGAN.timestamp()
    return None


# -------------------------------------------------------------------- overload


def served(seed: int, rate: float, seconds: int, busy_s: float = float("inf")) -> list[Moment]:
    """Requests at `rate` a second until `busy_s`; the pool is full at about 32 of them, each of 20 s: 1.5 a second."""
    engine = PaperEngine(seed, capacity=32_000)

    def arrive() -> None:
        for _ in range(4):
            if engine.t < busy_s and engine.rng.random() < rate / 4:
                engine.ask(engine.rng.randint(400, 800), engine.rng.randint(400, 800))

    return engine.run(seconds, arrive).moments


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_a_queue_that_grows_at_a_full_pool_is_an_overload(seconds: int) -> None:
    for seed in range(2):
        finding = found(OVERLOAD, as_metrics(every(served(seed, 2.6, 900), seconds)))
        assert finding is not None
        assert finding.verdict == "likely", (seed, finding.explanation)
        assert value(finding, "arrival_rate_low") < 2.6 < value(finding, "arrival_rate_high")


def test_the_queue_stops_growing_at_the_rate_that_the_finding_names() -> None:
    """Half of the excess more than its upper bound still grows; at its lower bound nothing is found."""
    for seed in range(2):
        finding = found(OVERLOAD, as_metrics(every(served(seed, 2.6, 900), 15)))
        assert finding is not None
        low, high = value(finding, "completion_rate_low"), value(finding, "completion_rate_high")
        calm = served(seed + 100, low, 3600)
        assert found(OVERLOAD, as_metrics(every(calm, 15))) is None
        assert calm[-1].waiting < 30
        assert served(seed + 200, (high + 2.6) / 2, 3600)[-1].waiting > 300


def test_a_queue_that_does_not_grow_is_no_overload() -> None:
    def closed_loop(seed: int) -> list[Moment]:
        engine = PaperEngine(seed, capacity=32_000)

        def again() -> None:
            engine.ask(engine.rng.randint(400, 800), engine.rng.randint(400, 800), again)

        for _ in range(80):
            again()
        return engine.run(900).moments

    for seed in range(2):
        assert found(OVERLOAD, as_metrics(every(closed_loop(seed), 5))) is None


def test_a_burst_or_a_pool_that_fills_up_is_no_overload() -> None:
    for seed in range(2):
        assert found(OVERLOAD, as_metrics(every(served(seed, 6.0, 600, busy_s=40), 5))) is None
        assert found(OVERLOAD, as_metrics(every(served(seed, 1.2, 1800), 5))) is None

    def long_ones(seed: int) -> list[Moment]:
        """Answers of half an hour: more wait each minute, and hardly one has ended."""
        engine = PaperEngine(seed, capacity=32_000, decode=0.5)
        return engine.run(1200, lambda: engine.ask(600, 900) if engine.rng.random() < 0.1 else None).moments

    for seed in range(2):
        assert found(OVERLOAD, as_metrics(every(long_ones(seed), 15))) is None


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_an_overload_is_decided_as_soon_as_the_docs_promise(seconds: int) -> None:
    need = CATALOGUE[OVERLOAD].sample_need
    assert need is not None
    growing = [Moment(float(t), 30, t, 0, 0.97, 900.0 * t, 900.0 * t, 30 * t, t) for t in range(1, 1200)]
    after_s = first_found_s(OVERLOAD, as_metrics(every(growing, seconds)))
    assert after_s == pytest.approx(1 + need.decides_after_s(seconds), abs=seconds)


def test_a_queue_that_grows_because_less_completes_is_not_called_an_overload() -> None:
    """Steps slow down, or a leak takes the pool: arrivals are as before."""
    moments, finished, waiting = [], 0.0, 1.0
    for t in range(1, 1200):
        rate = 2.0 if t < 300 else max(0.4, 2.0 - (t - 300) / 300)
        finished += rate
        waiting += 2.0 - rate + 0.02
        moments.append(Moment(float(t), 30, round(waiting), 0, 0.97, 900.0 * t, 900.0 * t, 30 * t, round(finished)))
    finding = found(OVERLOAD, as_metrics(every(moments, 15)))
    assert finding is not None
    assert finding.verdict == "cannot-tell"
    assert "held by no live request" in finding.explanation
    assert "at one sample each 15 s" in finding.missing


def test_a_queue_in_front_of_an_unused_pool_is_no_overload() -> None:
    unused = [Moment(float(t), 30, t, 0, 0.0, 900.0 * t, 900.0 * t, 30 * t, t) for t in range(1, 1200)]
    assert found(OVERLOAD, as_metrics(every(unused, 15))) is None


def test_completions_in_waves_widen_the_bounds() -> None:
    steady = [Moment(float(t), 30, t, 0, 0.97, 0, 0, t, t) for t in range(0, 601, 5)]
    waves = [one._replace(finished=one.finished // 60 * 60) for one in steady]
    narrow, wide = (QueueCourse(as_metrics(each)).completions().bounds for each in (steady, waves))
    assert wide.high - wide.low > 2 * (narrow.high - narrow.low)


def sglang(moments: Sequence[Moment]) -> list[Sample]:
    """As SGLang's page shows them: no steps, no reason for waits, tokens of requests that ended."""
    names = {
        "sglang:num_running_reqs": "running",
        "sglang:num_queue_reqs": "waiting",
        "sglang:token_usage": "usage",
        "sglang:num_requests_total": "finished",
    }
    sampler = Sampler(ExposedEngine("paper", "x:1", "0"), "metrics")
    samples = []
    for moment in moments:
        figures: dict[str, float] = {}
        for name, field in names.items():
            put_figure(figures, name, {}, getattr(moment, field))
        put_figure(figures, "sglang:prompt_tokens_total", {}, 600.0 * moment.finished)
        put_figure(figures, "sglang:cache_hit_rate", {}, moment.prefix_hits)
        samples.append(sampler.sample(round((BEGAN.timestamp() + moment.t) * 1e9), "", figures))
    return samples


def test_an_overload_is_found_by_sglangs_names() -> None:
    for seconds in (15, 60):
        finding = found(OVERLOAD, sglang(every(served(1, 2.6, 900), seconds)))
        assert finding is not None
        assert finding.verdict == "likely"


# -------------------------------------------------------------------- head of line


POOL = (Fact("paper@x:1/0", "", "kv_cache_size_tokens", 40_000), Fact("paper@x:1/0", "", "block_size", 16))


def held_back(seconds: int = 400, usage: float = 0.5, running: int = 3, **changed: int) -> list[Moment]:
    """A chat that runs 8, then 3 that go on while 12 wait behind one that needs much."""
    busy = [Moment(float(t), 8, 0, 0, 0.4, 300.0 * t, 200.0 * t, 30 * t, 2 * t) for t in range(1, 120)]
    last = busy[-1]._replace(running=running, finished=busy[-1].finished + 8 - running)
    held = [
        last._replace(
            t=120.0 + n,
            waiting=min(2 + n // 10, 12),
            usage=usage + n * running * 30 / 40_000 / 10,
            generation_tokens=last.generation_tokens + n * running * 30 / 10,
            steps=last.steps + 3 * n,
            **changed,
        )
        for n in range(seconds)
    ]
    return [*busy, *held]


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_a_queue_that_stands_still_beside_room_is_a_head_of_line(seconds: int) -> None:
    moments = every(held_back(), seconds)
    finding = found(HEAD_OF_LINE, [*POOL, *as_metrics(moments)])
    assert finding is not None
    assert (finding.verdict, finding.severity) == ("likely", "warning"), finding.explanation
    positions = {one.name: one.position for one in finding.evidence}
    assert positions["waiting"] == f"scrape {len(moments)}"
    assert positions["steps"].endswith(f" to scrape {len(moments)}")
    assert found(HEAD_OF_LINE, as_metrics(moments, "deferred")) is None
    older = found(HEAD_OF_LINE, as_metrics(moments, "deferred"), information=True)
    assert older is not None
    assert (older.verdict, older.severity) == ("cannot-tell", "info"), "its other causes are no incident"
    assert "LoRA" in older.explanation
    assert "a long prompt" in older.explanation  # the size of the pool is not known


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_a_head_of_line_is_decided_as_soon_as_the_docs_promise(seconds: int) -> None:
    need = CATALOGUE[HEAD_OF_LINE].sample_need
    assert need is not None
    after_s = first_found_s(HEAD_OF_LINE, as_metrics(every(held_back(), seconds)))
    assert after_s == pytest.approx(120 + need.decides_after_s(seconds), abs=2 * seconds)


@pytest.mark.parametrize(
    "moments",
    [
        held_back(usage=0.9),  # hardly any room
        held_back(deferred=12),  # all that wait, wait for something else
        held_back(seconds=60),
        [one._replace(steps=one.steps if one.t < 120 else 4000, generation_tokens=0) for one in held_back()],  # stalled
        [one._replace(prompt_tokens=300.0 * one.t) for one in held_back()],  # prompts go on being computed
        [one._replace(finished=2 * round(one.t)) for one in held_back()],  # so many end, so many are admitted
        [one._replace(preemptions=round(one.t) // 5) for one in held_back()],  # they come back, and go
    ],
)
def test_what_is_no_head_of_line(moments: list[Moment]) -> None:
    for seconds in (5, 15):
        assert found(HEAD_OF_LINE, [*POOL, *as_metrics(every(moments, seconds))], information=True) is None


def test_a_long_prompt_that_takes_each_step_is_no_head_of_line() -> None:
    """Nothing is generated meanwhile, or usage grows by more than the tokens that are: a prompt comes in chunks."""
    alone = [one if one.t < 120 else one._replace(generation_tokens=23_800.0) for one in held_back()]
    assert found(HEAD_OF_LINE, as_metrics(every(alone, 15)), information=True) is None
    grows = [one._replace(usage=min(0.74, one.usage + max(0.0, one.t - 120) / 1000)) for one in held_back(seconds=200)]
    assert found(HEAD_OF_LINE, [*POOL, *as_metrics(every(grows, 15))]) is None


def test_where_the_stream_is_read_counters_are_not_asked_for_a_head_of_line() -> None:
    """The engine's events would show each request of its queue."""
    scene = Spoken()
    scene.watch.feed([msgspec.structs.replace(one, engine=ENGINE) for one in as_metrics(every(held_back(), 15))])
    scene.watch.settle()
    assert scene.ledger.samples
    assert scene.firing(HEAD_OF_LINE) == []


@pytest.mark.parametrize(("beside", "shown"), [(40, True), (60, False)])
def test_each_running_request_may_have_begun_a_block_that_its_tokens_do_not_fill(beside: int, shown: bool) -> None:
    """Three run, in blocks of 16 tokens: 48 tokens more than were generated are no prompt."""
    rises = [one._replace(usage=one.usage + (beside / 40_000 if one.t > 140 else 0.0)) for one in held_back()]
    rises = [one for one in rises if one.t % 15 == 0]
    assert bool(found(HEAD_OF_LINE, [*POOL, *as_metrics(rises)])) is shown


@pytest.mark.parametrize(("seconds", "shown"), [(120, False), (121, True)])
def test_a_queue_stands_still_for_two_minutes_before_it_is_a_head_of_line(seconds: int, shown: bool) -> None:
    moments = [one for one in held_back(seconds=seconds) if one.t % 15 == 0]
    assert bool(found(HEAD_OF_LINE, [*POOL, *as_metrics(moments)])) is shown


def test_an_engine_that_never_ran_more_is_at_its_limit() -> None:
    assert found(HEAD_OF_LINE, [*POOL, *as_metrics(every(held_back(running=8), 15))]) is None


def test_steps_of_many_seconds_take_longer_to_show_it() -> None:
    slow = [one._replace(steps=one.steps // 150) for one in held_back()]
    assert found(HEAD_OF_LINE, [*POOL, *as_metrics(every(slow, 5))]) is None


# -------------------------------------------------------------------- prefix cache hit rate


def hits(
    rate: Callable[[float], float], seconds: int = 2400, each: Callable[[float], float] = lambda t: 800.0
) -> list[Moment]:
    """Two requests a second of `each` tokens; `rate` of them are hit at t."""
    moments, asked, hit = [], 0.0, 0.0
    for t in range(1, seconds):
        asked += 2 * each(t)
        hit += 2 * each(t) * rate(t)
        moments.append(
            Moment(float(t), 8, 0, 0, 0.5, asked, 60.0 * t, 30 * t, 2 * t, prefix_queries=asked, prefix_hits=hit)
        )
    return moments


def test_a_queue_of_which_one_request_was_admitted_is_held_back_only_since() -> None:
    samples = [one for one in as_metrics(every(held_back(seconds=300), 15)) if isinstance(one, Sample)]
    admitted = [msgspec.structs.replace(one, running=(one.running or 0) + 1) for one in samples[-8:]]
    whole = unadmitted_queue(samples, Settings())
    since = unadmitted_queue([*samples[:-8], *admitted], Settings())
    assert whole is not None
    assert since is not None
    assert len(whole.samples) > 8
    assert list(since.samples) == admitted


def test_a_cache_that_never_hits_has_no_fall() -> None:
    samples = [one for one in as_metrics(every(hits(lambda t: 0.0), 15)) if isinstance(one, Sample)]
    assert hit_rate_drop(samples, Settings()) is None


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_a_hit_rate_that_fell_is_a_question_with_its_causes(seconds: int) -> None:
    samples = as_metrics(every(hits(lambda t: 0.7 if t < 1500 else 0.05), seconds))
    finding = found(PREFIX_HITS, samples)
    assert finding is not None
    assert finding.verdict == "cannot-tell"
    spans = {one.name: one.position for one in finding.evidence}
    assert spans["usage"] == samples[-1].position
    assert spans["hit_rate"].endswith(f" to {samples[-1].position}")
    assert value(finding, "hit_rate_before") == pytest.approx(70, abs=1)
    assert value(finding, "hit_rate") < 10
    for cause in ("another tenant", "evicted", "lookups"):
        assert cause in finding.explanation


def test_requests_are_counted_though_none_ended_in_the_first_minute_of_a_fall() -> None:
    """They are exposed, and end in batches: none in that minute, and twice as many in the next."""
    moments = [
        one._replace(finished=min(one.finished, 3000) if one.t <= 1560 else one.finished)
        for one in hits(lambda t: 0.7 if t <= 1500 else 0.0)
    ]
    finding = found(PREFIX_HITS, as_metrics([one for one in moments if one.t % 60 == 0]))
    assert finding is not None
    assert value(finding, "requests_finished") == 2 * 840
    assert "1,680 requests ended meanwhile" in finding.explanation
    assert finding.since == timestamp(round((BEGAN.timestamp() + 1500) * 1e9))


def test_a_minute_without_an_end_does_not_hide_that_the_load_changed() -> None:
    moments = [
        one if one.t <= 1500 else one._replace(finished=3000 + max(0, round(one.t - 1560) // 5))
        for one in hits(lambda t: 0.7 if t <= 1500 else 0.0)
    ]
    assert found(PREFIX_HITS, as_metrics([one for one in moments if one.t % 60 == 0])) is None


def test_scrapes_a_little_closer_than_a_minute_bound_a_cell_each() -> None:
    looked_up = [Moment(54.0 * n, 8, 0, 0, 0.5, 0.0, 0.0, 0, 0, prefix_queries=n) for n in range(1, 4)]
    assert [cell.looked_up for cell in hit_cells(as_metrics(looked_up))] == [1, 1]


@pytest.mark.parametrize("seconds", INTERVALS_S)
def test_a_fall_is_decided_as_soon_as_the_docs_promise(seconds: int) -> None:
    need = CATALOGUE[PREFIX_HITS].sample_need
    assert need is not None
    moments = hits(lambda t: 0.7 if t <= 601 else 0.0)
    after_s = first_found_s(PREFIX_HITS, as_metrics(every(moments, seconds)))
    assert after_s == pytest.approx(1 + need.decides_after_s(seconds), abs=2 * 60)


@pytest.mark.parametrize(
    "moments",
    [
        hits(lambda t: 0.7 if t < 2250 else 0.0),  # not for five minutes yet
        hits(lambda t: 0.7 if t < 1500 else 0.3),  # a mix of loads
        hits(lambda t: 0.1 if t < 1500 else 0.0),
        hits(lambda t: 0.7 if t < 1500 else 0.0, each=lambda t: 800.0 if t < 1500 else 3000.0),  # other prompts
        hits(lambda t: 0.7 if t // 120 % 2 else 0.0),  # two loads that alternate
        hits(lambda t: 0.0),
        hits(lambda t: 0.0 if t < 1500 else 0.7),
    ],
)
def test_what_is_no_fall(moments: list[Moment]) -> None:
    for seconds in (5, 60):
        assert found(PREFIX_HITS, as_metrics(every(moments, seconds))) is None


def test_fewer_requests_are_another_load() -> None:
    moments = hits(lambda t: 0.7 if t < 1500 else 0.0)
    fewer = [
        one
        if one.t < 1500
        else one._replace(finished=3000 + round((one.t - 1500) / 5), prefix_queries=2_400_000 + (one.t - 1500) * 160)
        for one in moments
    ]
    assert found(PREFIX_HITS, as_metrics(every(fewer, 15))) is None


def test_a_log_has_only_a_mean_of_the_last_requests() -> None:
    assert found(PREFIX_HITS, as_log(every(hits(lambda t: 0.7 if t < 1500 else 0.0), 10))) is None


def test_a_fall_is_found_by_sglangs_names() -> None:
    moments = [one._replace(prefix_hits=0.7 if one.t < 1500 else 0.02) for one in hits(lambda t: 0.7)]
    finding = found(PREFIX_HITS, sglang(every(moments, 15)))
    assert finding is not None
    assert finding.verdict == "cannot-tell"
    assert found(PREFIX_HITS, sglang(every(hits(lambda t: 0.7), 15))) is None
