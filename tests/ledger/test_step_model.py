"""The model of step times against the times that it was fitted to and others: the formula is known to the test only."""

from __future__ import annotations

import math
import random

import pytest

from kvscope.monitor.ledger.durations import StepModel, StepWork


def drawn_work(rng: random.Random) -> StepWork:
    running, prompt = rng.randint(1, 64), rng.choice([0, 0, 0, 512, 2048, rng.randint(2, 8192)])
    context, before = sum(rng.randint(10, 8000) for _ in range(running)), rng.randint(0, 20_000)
    if not prompt:
        return StepWork(running, context, 0)
    return StepWork(running + prompt, context + before + prompt, prompt * (before + prompt // 2))


@pytest.mark.parametrize("outliers", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(
    "terms",
    [(5e-3, 3e-5, 1e-8, 1e-9), (6.0, 0, 0, 0), (1e-3, 1e-6, 0, 0), (0.02, 1e-3, 1e-6, 1e-8), (1, 1e-2, 0, 1e-7)],
)
def test_a_step_that_was_not_fitted_is_expected_within_a_tenth(
    terms: tuple[float, float, float, float], outliers: float
) -> None:
    rng = random.Random(3)

    def seconds(work: StepWork) -> float:
        return sum(cost * amount for cost, amount in zip(terms, work.terms, strict=True))

    works = [drawn_work(rng) for _ in range(400)]
    slow = [rng.uniform(3, 50) if rng.random() < outliers else math.exp(rng.gauss(0, 0.1)) for _ in works]
    model = StepModel([(work, seconds(work) * factor) for work, factor in zip(works[:250], slow, strict=False)])
    errors = sorted(abs(model.expected_s(work) / seconds(work) - 1) for work in works[250:])
    assert errors[len(errors) // 2] < 0.1
    assert errors[len(errors) * 95 // 100] < 0.2
    assert 0.05 < model.jitter < 0.2


def test_steps_that_are_all_alike_give_their_own_time_and_say_nothing_of_larger_ones() -> None:
    model = StepModel([(StepWork(1, 100 + n, 0), 0.02) for n in range(50)])
    assert model.expected_s(StepWork(1, 150, 0)) == pytest.approx(0.02)
    assert model.has_seen_like(StepWork(2, 200, 0))
    assert not model.has_seen_like(StepWork(8192, 8400, 8192 * 4096))
    assert not model.has_seen_like(StepWork(1, 100_000, 0))


@pytest.mark.parametrize("seed", range(5))
def test_two_sizes_of_context_tell_what_a_third_costs(seed: int) -> None:
    """Most steps read nearly the same, so that the fixed cost and that of context are hard to tell apart."""
    rng = random.Random(seed)

    def seconds(work: StepWork) -> float:
        return 2.4 + 8e-4 * work.context

    works = [StepWork(4, 6600 + n, 0) for n in range(20)] + [StepWork(5, 8300 + n, 0) for n in range(20)]
    model = StepModel([(work, seconds(work) * math.exp(rng.gauss(0, 0.02))) for work in works])
    third = StepWork(2, 3300, 0)
    assert model.expected_s(third) == pytest.approx(seconds(third), rel=0.1)
