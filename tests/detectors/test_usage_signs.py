"""The signs of leak.finished-held from metrics and logs, each at its bounds (leak/finished_held.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.detectors.leak.usage_series import fit_of, series_of
from kvscope.monitor.detectors.sample_math import prompt_tokens_until
from kvscope.monitor.questions.pipeline import Pipeline

ENGINE = "made-up@x:1/0"
BEGAN_NS = 1_795_000_000 * 10**9
FINISHED_HELD = "leak.finished-held"


def at(second: float, running: int, usage: float, **figures: float) -> Sample:
    """A scrape so many seconds after the first."""
    known = {"waiting": 0, "prompt_tokens_per_s": 0.0, "generation_tokens_per_s": 0.0} | figures
    at_ns = BEGAN_NS + round(second * 1e9)
    return Sample(ENGINE, f"{second:g}", at_ns, running, usage=usage, source="metrics", **known)  # type: ignore[arg-type]


def held(records: Sequence[Sample | Fact]) -> FindingReport | None:
    """The finding of blocks that finished requests keep, if it fires at the end."""
    watch = Pipeline()
    watch.feed(records)
    watch.settle()
    return next((each for each in watch.findings("firing") if each.code == FINISHED_HELD), None)


# -------------------------------------------------------------------- requests leave and usage does not fall


def drain(lines: int = 12, *, tokens_of_pool: int = 6_000, constant: float = 0.0) -> list[Sample]:
    """Usage rises with the prompts of a pool of so many tokens, and by a constant; then 7 of 8 requests leave."""
    samples, usage = [], 0.1
    for n in range(lines):
        prompt = 100.0 + 150 * (n * 7 % 5)
        usage += prompt / tokens_of_pool + constant
        samples.append(at(20.0 * n, 1 if n == lines - 1 else 8, usage, prompt_tokens_per_s=prompt))
    return samples


@pytest.mark.parametrize(("lines", "leaks"), [(6, False), (7, True)])
def test_six_changes_of_usage_may_follow_prompts_by_chance(lines: int, leaks: bool) -> None:
    assert bool(held(drain(lines))) is leaks


@pytest.mark.parametrize(("tokens_of_pool", "leaks"), [(6_000, True), (60_000, False)])
def test_a_rise_of_the_size_of_one_request_is_no_leak(tokens_of_pool: int, leaks: bool) -> None:
    assert bool(held(drain(tokens_of_pool=tokens_of_pool))) is leaks


@pytest.mark.parametrize(("constant", "leaks"), [(0.01, True), (0.03, False)])
def test_a_rise_that_mostly_comes_whatever_is_taken_in_is_decoding(constant: float, leaks: bool) -> None:
    """Prompts raise usage by 0.02 a line on average."""
    assert bool(held(drain(tokens_of_pool=20_000, constant=constant))) is leaks


# -------------------------------------------------------------------- nothing runs


def test_an_engine_with_requests_that_wait_is_not_idle() -> None:
    """It does not expose what they wait for: KV from elsewhere may hold blocks."""
    waiting = [at(15.0 * n, 0, 0.3, waiting=3) for n in range(60)]
    idle = [at(15.0 * n, 0, 0.3) for n in range(60)]
    assert held(waiting) is None
    assert held(idle) is not None


@pytest.mark.parametrize(("scrapes", "fires"), [(2, False), (3, True)])
def test_three_scrapes_show_that_nothing_moves_in_a_full_pool(scrapes: int, fires: bool) -> None:
    full = [at(60.0 * n, 0, 0.97, waiting=9, deferred=3, steps=5, finished=5) for n in range(scrapes)]
    assert bool(held(full)) is fires


def test_a_full_pool_of_a_consumer_without_a_queue_is_idle() -> None:
    role = Fact(ENGINE, "x:1", "kv_role", "kv_consumer")
    finding = held([role, *(at(15.0 * n, 0, 0.97) for n in range(10))])
    assert finding is not None
    assert "nothing was running or waiting" in finding.explanation


def test_more_than_live_requests_can_hold_is_dated_from_its_first_sample() -> None:
    """One runs, in a pool that 40 of the greatest length fit into."""
    fits = Fact(ENGINE, "x:0", "max_concurrency", 40.0)
    finding = held([fits, at(0.0, 1, 0.04), *(at(15.0 * n, 1, 0.9) for n in range(1, 10))])
    assert finding is not None
    assert (finding.verdict, finding.position) == ("likely", "15")


# -------------------------------------------------------------------- usage by prompt tokens


@pytest.mark.parametrize(("lines", "fits"), [(2, False), (3, True)])
def test_three_points_have_a_slope_and_two_have_none(lines: int, fits: bool) -> None:
    assert (fit_of(series_of(drain(lines))) is not None) is fits


def test_prompt_tokens_are_throughputs_over_the_time_since_the_sample_before() -> None:
    """Of the first sample of a log, over ten seconds."""
    samples = [at(0.0, 1, 0.1, prompt_tokens_per_s=100.0), at(20.0, 1, 0.1, prompt_tokens_per_s=100.0)]
    assert prompt_tokens_until(samples) == [1000.0, 3000.0]


@pytest.mark.parametrize("blocks", ["None", 501])
def test_a_number_of_blocks_that_is_none_gives_no_forecast(blocks: str | int) -> None:
    """It is the harm of a leak that has a forecast, and the leak is found either way."""
    fact = Fact(ENGINE, "x:1", "num_gpu_blocks", blocks)
    assert held([fact, *drain()]) is not None
