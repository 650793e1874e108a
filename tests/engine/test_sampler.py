"""What is drawn under SamplingParams: from the right tokens, in the right shares, and by the request alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install -e .[engine]")

import torch

from kvscope.engine.requests.request import Request, Sampled, SamplingParams
from tests.engine.steps import sample

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]
DRAWS = 4000


def request(number: int = 1, outputs: int = 0, **params: Any) -> Request:
    drawn = Request(number, f"r-{number}", [1], SamplingParams(**params))
    for token in range(outputs):
        drawn.append(token)
    return drawn


def choose(logits: torch.Tensor, requests: list[Request], seed: int) -> list[Sampled]:
    return sample(logits, requests, seed)


def tokens(logits: torch.Tensor, requests: list[Request], seed: int) -> list[int]:
    return [sampled.token_id for sampled in choose(logits, requests, seed)]


def shares(**params: Any) -> list[float]:
    """How often each token comes out, over many requests in one step."""
    logits = torch.tensor(PROBABILITIES).log().repeat(DRAWS, 1)
    drawn = tokens(logits, [request(number, **params) for number in range(DRAWS)], seed=0)
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
        ({"min_p": 0.6}, normalised([0.4, 0.3, 0, 0])),  # 0.24 at least
        ({"min_p": 0.4, "temperature": 0.5}, normalised([0.16, 0.09, 0, 0])),  # 0.064 at least
        ({"min_p": 1.0}, [1.0, 0, 0, 0]),
        ({"min_p": 0.45, "top_k": 3, "top_p": 0.75}, normalised([0.4, 0.3, 0, 0])),
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
    alone = [tokens(logits[None], [request(1, outputs, seed=9)], seed=0)[0] for outputs in range(20)]
    assert len(set(alone)) > 5
    others = [request(number, temperature=number % 3, top_k=number) for number in range(2, 8)]
    for outputs, token in enumerate(alone):
        rows = torch.cat([torch.randn(len(others), 50), logits[None]])
        assert tokens(rows, [*others, request(77, outputs, seed=9)], seed=123)[-1] == token


def test_without_a_seed_requests_and_engines_draw_differently() -> None:
    logits = torch.zeros(1, 1000)
    assert choose(logits, [request(1)], seed=0) == choose(logits, [request(1)], seed=0)
    drawn = [tokens(logits, [request(number)], seed)[0] for number in (1, 2) for seed in (0, 1)]
    assert len(set(drawn)) == len(drawn)


def test_greedy_requests_among_drawing_ones_take_the_largest() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 30)
    requests = [request(number, temperature=number % 2) for number in range(6)]
    assert tokens(logits, requests, seed=0)[::2] == logits.argmax(-1).tolist()[::2]


def with_tokens(prompt: list[int], output: list[int], **params: Any) -> Request:
    made = Request(1, "r", prompt, SamplingParams(temperature=0, **params))
    for token in output:
        made.append(token)
    return made


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        # Tokens 0 and 1 are in the prompt, 1 once and 2 twice in the output, 3 nowhere.
        ({"presence_penalty": 1.5}, [3.0, 1.0 - 1.5, -1.0 - 1.5, -2.0]),
        ({"frequency_penalty": 0.5}, [3.0, 1.0 - 0.5, -1.0 - 2 * 0.5, -2.0]),
        ({"frequency_penalty": -2.0}, [3.0, 1.0 + 2.0, -1.0 + 4.0, -2.0]),
        ({"repetition_penalty": 2.0}, [3.0 / 2, 1.0 / 2, -1.0 * 2, -2.0]),
        (
            {"repetition_penalty": 2.0, "frequency_penalty": 0.5, "presence_penalty": 1.0},
            [3.0 / 2, 1.0 / 2 - 1.5, -1.0 * 2 - 2.0, -2.0],
        ),
    ],
)
def test_penalties_change_the_logits_of_what_was_there(params: dict[str, float], expected: list[float]) -> None:
    logits = torch.tensor([[3.0, 1.0, -1.0, -2.0]])
    before = logits.clone()
    one = with_tokens([0, 1], [2, 1, 2], **params)
    for token in range(4):
        # Just enough to make this token the likeliest by its penalised logit, and just too little.
        for more, wins in ((1e-3, True), (-1e-3, False)):
            lifted = torch.tensor([expected]).where(torch.arange(4) != token, torch.tensor(-9.0)).max().item()
            row = logits.clone()
            row[0, token] = unpenalised(one, token, lifted + more)
            assert (tokens(row, [one], seed=0)[0] == token) == wins
    assert logits.equal(before)


def unpenalised(request: Request, token: int, logit: float) -> float:
    """The logit that penalties make this one."""
    params, times = request.params, request.output_token_ids.count(token)
    logit += params.frequency_penalty * times + params.presence_penalty * (times > 0)
    if token not in request.token_ids:
        return logit
    return logit * params.repetition_penalty if logit > 0 else logit / params.repetition_penalty


def test_penalties_are_a_request_s_own_whoever_shares_the_step() -> None:
    torch.manual_seed(0)
    logits = torch.randn(30)
    one = Request(1, "r", [1, 2], SamplingParams(seed=3, frequency_penalty=2, repetition_penalty=1.3))
    alone = []
    for _ in range(10):
        alone += tokens(logits[None], [one], seed=0)
        one.append(alone[-1])
    again = Request(9, "r", [1, 2], one.params)
    for token in alone:
        shared = tokens(torch.stack([torch.randn(30), logits]), [request(2, presence_penalty=1), again], seed=5)
        assert shared[1] == token
        again.append(token)


def test_logprobs_are_the_models_own_whatever_is_drawn() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 20)
    expected = logits.log_softmax(-1)
    drawing = with_tokens([1], [2, 3], logprobs=4, presence_penalty=2.0)
    rows = [drawing, request(2, temperature=3, logprobs=0), request(3)]
    reported = choose(logits, rows, seed=1)
    assert [len(one.logprobs) for one in reported] == [5, 1, 0]
    for row, one in enumerate(reported[:2]):
        own = one.logprobs[0]
        assert own.token_id == one.token_id
        assert own.logprob == pytest.approx(expected[row, one.token_id].item())
        assert own.rank == 1 + int((logits[row] > logits[row, one.token_id]).sum())
    top = reported[0].logprobs[1:]
    assert [one.token_id for one in top] == logits[0].argsort(descending=True)[:4].tolist()
    assert [one.rank for one in top] == [1, 2, 3, 4]


def test_a_bias_moves_a_token_and_no_other_request() -> None:
    logits = torch.tensor(PROBABILITIES).log().repeat(2, 1)
    greedy: dict[str, Any] = {"temperature": 0.0}
    pushed = request(1, logit_bias={3: 100.0, 0: -100.0}, **greedy)
    assert tokens(logits, [pushed, request(2, **greedy)], seed=0) == [3, 0]


def test_no_end_is_sampled_before_min_tokens_and_one_may_be_after() -> None:
    logits = torch.tensor(PROBABILITIES).log().repeat(1, 1)  # the likeliest is token 0

    def chosen(outputs: int, **params: Any) -> int:
        asked = request(1, outputs=outputs, temperature=0.0, min_tokens=2, max_tokens=9, **params)
        (sampled,) = sample(logits, [asked], 0, eos=frozenset({0}))
        return sampled.token_id

    assert [chosen(outputs) for outputs in (0, 1, 2)] == [1, 1, 0]
    assert chosen(0, stop_token_ids=frozenset({1})) == 2
    assert chosen(0, ignore_eos=True) == 0
