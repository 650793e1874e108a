"""When the pool of a plain vLLM will be full, by its usage, and no forecast where nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median

import pytest

from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.pipeline import Pipeline

pytestmark = pytest.mark.slow

ENGINE = "qwen/0@127.0.0.1:8000"
BEGAN_NS = 1_795_000_000 * 10**9
BLOCKS = 501
EVERY_S = 5
A_MINUTE = 60 // EVERY_S
Leak = Callable[[float], float]


def plain_vllm(minutes: int, leak: Leak, seed: int, *, pause: int = 4) -> tuple[Pipeline, list[int]]:
    """Bursts of some requests each minute, with nothing running in its last `pause` scrapes. leak: blocks held by
    nobody after so many minutes. Usage is in whole blocks, as vLLM counts it. Also what living requests held.
    """
    rng = random.Random(seed)
    watch = Pipeline()
    facts = (("num_gpu_blocks", BLOCKS), ("block_size", 16), ("model", "qwen"), ("exposition", "vllm"))
    watch.feed([Fact(ENGINE, "scrape 1", name, value, BEGAN_NS) for name, value in facts])
    tokens = 0
    samples: list[Sample] = []
    living: list[int] = []
    for number in range(minutes * A_MINUTE):
        busy = number % A_MINUTE < A_MINUTE - pause
        running = rng.randint(1, 6) if busy else 0
        tokens += 40 * running * EVERY_S
        living.append(sum(rng.randint(4, 14) for _ in range(running)))
        used = min(round(leak(number / A_MINUTE)) + living[-1], BLOCKS - 1)
        samples.append(
            Sample(
                ENGINE,
                f"scrape {number + 1}",
                BEGAN_NS + number * EVERY_S * 10**9,
                running=running,
                waiting=0,
                deferred=0,
                usage=used / (BLOCKS - 1),
                preemptions=0,
                generation_tokens=tokens,
                generation_tokens_per_s=40.0 * running,
                prompt_tokens_per_s=80.0 * running,
                steps=tokens // 4,
                finished=tokens // 200,
                source="metrics",
            )
        )
    for begin in range(0, len(samples), A_MINUTE):
        watch.feed(samples[begin : begin + A_MINUTE])
    return watch, living


def of_leak(watch: Pipeline) -> list[FindingReport]:
    return [finding for finding in watch.findings("firing") if finding.code.startswith("leak.")]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("minutes", [50, 75])
def test_a_leak_of_one_percent_a_minute_is_forecast_within_a_tenth(minutes: int, seed: int) -> None:
    lost_each_minute = (BLOCKS - 1) / 100
    watch, living = plain_vllm(minutes, lambda at: lost_each_minute * at, seed)
    (finding,) = [one for one in of_leak(watch) if one.harm is not None]
    assert finding.harm is not None
    forecast = finding.harm.forecast
    assert forecast is not None
    # The pool is full when the leak leaves no room for what living requests usually hold.
    left_s = ((BLOCKS - 1 - median(living)) / lost_each_minute - minutes) * 60
    assert forecast.earliest_s < forecast.full_in_s < forecast.latest_s
    assert forecast.full_in_s == pytest.approx(left_s, rel=0.1)
    assert forecast.blocks_per_s == pytest.approx(lost_each_minute / 60, rel=0.1)
    assert "At this rate the pool is full in" in finding.explanation
    assert (finding.harm.share_of_pool, finding.harm.lost_s) == (None, None)


def steps_up_and_down(at: float) -> float:
    return 40.0 * (int(at) // 10 % 2)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "held",
    [lambda _at: 0.0, lambda at: min(60.0, 5 * at) if at < 45 else 0.0, steps_up_and_down],
    ids=["nothing", "a lease that ends", "a hold that comes and goes"],
)
def test_healthy_shapes_have_no_forecast(held: Leak, seed: int) -> None:
    for pause in (4, 0):
        watch, _ = plain_vllm(60, held, seed, pause=pause)
        assert not [one for one in watch.findings("firing") if one.harm is not None and one.harm.forecast is not None]


def test_a_leak_that_has_stopped_has_no_forecast() -> None:
    watch, _ = plain_vllm(80, lambda at: 5 * min(at, 20.0), 1)
    assert not [one for one in watch.findings("firing") if one.harm is not None and one.harm.forecast is not None]
