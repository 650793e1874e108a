"""Percentiles of the time to the first token and in the queue, from a stream and from samples."""

from __future__ import annotations

import math
import random

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.ledger.request_latency import exact_latency, histogram_latency, recent_sample_latency
from kvscope.monitor.questions.pipeline import Pipeline


def test_percentiles_lie_within_the_buckets_of_the_requests() -> None:
    rng = random.Random(5)
    bounds = [0.1, 0.5, 1.0, 5.0, 20.0, math.inf]
    for _ in range(200):
        seconds = [rng.expovariate(0.5) for _ in range(rng.randint(1, 60))]
        counts = []
        lower = 0.0
        for upper in bounds:
            inside = sum(lower < one <= upper for one in seconds)
            counts += [(lower, upper, 1)] * inside  # as they come, scrape by scrape
            lower = upper
        rng.shuffle(counts)
        exact, reported = exact_latency(seconds), histogram_latency(counts)
        assert exact is not None
        assert reported is not None
        assert reported.requests == exact.requests == len(seconds)
        for value, between in ((exact.p50_s, reported.p50_s), (exact.p95_s, reported.p95_s)):
            lower, upper = next((low, high) for low, high, _ in sorted(counts) if low < value <= high)
            assert lower <= between <= upper


def test_no_request_is_no_latency() -> None:
    assert exact_latency([]) is None
    assert histogram_latency([]) is None
    assert recent_sample_latency([Sample("m", "1", 10**9)]) == (None, None)


def test_only_the_last_five_minutes_of_samples_count() -> None:
    samples = [Sample("m", str(at), at * 10**9, queue_s=((0.0, float(at), 1),)) for at in range(60, 1_260, 60)]
    _, queue_time = recent_sample_latency(samples)
    assert queue_time is not None
    assert queue_time.requests == 5


def test_a_queue_time_within_a_wide_bucket_is_no_longer_than_the_first_token() -> None:
    """The first bucket of vLLM's queue times ends at 0.3 s."""
    first_token = ((0.04, 0.06, 19), (0.06, 0.08, 1))
    sample = Sample("m", "1", 10**9, first_token_s=first_token, queue_s=((0.0, 0.3, 20),))
    whole, part = recent_sample_latency([sample])
    assert whole is not None
    assert part is not None
    assert (part.p50_s, part.p95_s) == (whole.p50_s, whole.p95_s)


def test_a_queue_time_whose_bucket_is_above_the_first_token_stays_in_it() -> None:
    """Requests that end now may have waited before those that get their first token now."""
    sample = Sample("m", "1", 10**9, first_token_s=((0.0, 0.1, 20),), queue_s=((5.0, 10.0, 20),))
    _, queue_time = recent_sample_latency([sample])
    assert queue_time is not None
    assert (queue_time.p50_s, queue_time.p95_s) == (5.0, 5.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_streams_latency_is_that_of_its_requests(seed: int) -> None:
    """Beside the times that the scheduler was stepped at, and what it had admitted by then."""
    clock = VirtualClock()
    lab = Lab(clock=clock, total=65, seed=seed)
    rng = random.Random(seed)
    came: dict[str, int] = {}
    waited: dict[str, float] = {}
    for _ in range(80):
        if rng.random() < 0.5:
            came[lab.arrive(rng.randint(4, 60), max_tokens=rng.randint(2, 20)).id] = clock.monotonic_ns()
        at_ns = clock.monotonic_ns()
        lab.step(rng.uniform(0.05, 0.5))
        for request in lab.scheduler.running:
            waited.setdefault(request.id, (at_ns - came[request.id]) / 1e9)
    lab.flush()
    watch = Pipeline()
    watch.feed(lab.frames)
    (engine,) = watch.engines()
    assert engine.first_token is not None
    assert engine.queue_time is not None
    assert engine.queue_time.requests >= engine.first_token.requests > 10
    expected = exact_latency(waited.values())
    assert expected is not None
    assert engine.queue_time.p50_s == pytest.approx(expected.p50_s, abs=0.01)
    assert engine.queue_time.p95_s == pytest.approx(expected.p95_s, abs=0.01)
    assert engine.first_token.p50_s >= engine.queue_time.p50_s
