"""What is drawn under SamplingParams: from the right tokens, in the right shares, and by the request alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch

from engine.request import Request
from engine.sampler import sample
from engine.sampling import SamplingParams

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]
DRAWS = 4000


def request(number: int = 1, outputs: int = 0, **params: Any) -> Request:
    drawn = Request(number, f"r-{number}", [1], SamplingParams(**params))
    for token in range(outputs):
        drawn.append(token)
    return drawn


def shares(**params: Any) -> list[float]:
    """How often each token comes out, over many requests in one step."""
    logits = torch.tensor(PROBABILITIES).log().repeat(DRAWS, 1)
    drawn = sample(logits, [request(number, **params) for number in range(DRAWS)], seed=0)
    return [drawn.count(token) / DRAWS for token in range(len(PROBABILITIES))]


def normalised(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"temperature": 1.0}, PROBABILITIES),
        ({"temperature": 0.5}, normalised([p**2 for p in PROBABILITIES])),
        ({"temperature": 2.0}, normalised([math.sqrt(p) for p in PROBABILITIES])),
        ({"top_k": 2}, normalised([0.4, 0.3, 0, 0])),
        ({"top_k": 100}, PROBABILITIES),
        ({"top_p": 0.65}, normalised([0.4, 0.3, 0, 0])),
        ({"top_p": 0.01}, [1.0, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.75}, normalised([0.4, 0.3, 0, 0])),  # 0.7 of 0.9 is above 0.75
        ({"temperature": 0.0}, [1.0, 0, 0, 0]),
        ({"temperature": 1e-300}, [1.0, 0, 0, 0]),
    ],
)
def test_tokens_come_out_in_their_shares(params: dict[str, Any], expected: list[float]) -> None:
    for got, wanted in zip(shares(**params), expected, strict=True):
        # Four standard deviations; the draws are the same each time.
        assert abs(got - wanted) <= 4 * math.sqrt(wanted * (1 - wanted) / DRAWS)


def test_a_seed_decides_alone_whoever_shares_the_step() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50)
    alone = [sample(logits[None], [request(1, outputs, seed=9)], seed=0)[0] for outputs in range(20)]
    assert len(set(alone)) > 5
    others = [request(number, temperature=number % 3, top_k=number) for number in range(2, 8)]
    for outputs, token in enumerate(alone):
        rows = torch.cat([torch.randn(len(others), 50), logits[None]])
        assert sample(rows, [*others, request(77, outputs, seed=9)], seed=123)[-1] == token


def test_without_a_seed_requests_and_engines_draw_differently() -> None:
    logits = torch.zeros(1, 1000)
    assert sample(logits, [request(1)], seed=0) == sample(logits, [request(1)], seed=0)
    drawn = [sample(logits, [request(number)], seed)[0] for number in (1, 2) for seed in (0, 1)]
    assert len(set(drawn)) == len(drawn)


def test_greedy_requests_among_drawing_ones_take_the_largest() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 30)
    requests = [request(number, temperature=number % 2) for number in range(6)]
    assert sample(logits, requests, seed=0)[::2] == logits.argmax(-1).tolist()[::2]
