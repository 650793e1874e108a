"""Chooses each request's next token from its logits, and reports how likely it was.

min_tokens, logit_bias, penalties, min_p, top_k and top_p go in vLLM's order, and mean what they mean there. A grammar
lets the tokens be chosen that it allows, and moves on with the one that is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from kvscope.engine.requests.request import Request
from kvscope.engine.requests.request_output import Logprob, Sampled
from kvscope.engine.requests.sampling_params import SamplingParams
from kvscope.engine.requests.structured_output import Matcher


class SamplingTensors(NamedTuple):
    """A request as it will be when its next token is chosen.

    `place` is the number of output tokens before that one. Requests whose params penalise bring copies of their tokens.
    """

    number: int
    params: SamplingParams
    place: int
    token_ids: list[int]
    output_token_ids: list[int]
    matcher: Matcher | None

    @classmethod
    def of(cls, request: Request) -> SamplingTensors:
        """Return the request, with the additions of the steps in flight: of tokens that are not known, only the
        count.
        """
        place = len(request.output_token_ids) + request.num_output_placeholders
        penalises = request.params.penalises
        tokens, outputs = (request.token_ids, request.output_token_ids) if penalises else ((), ())
        return cls(request.number, request.params, place, list(tokens), list(outputs), request.matcher)

    def learn(self, token_id: int) -> None:
        """Replace the token that was not known by this one."""
        if self.params.penalises:
            self.token_ids.append(token_id)
            self.output_token_ids.append(token_id)


def sample(
    logits: Tensor, requests: Sequence[SamplingTensors], seed: int, eos_token_ids: Collection[int] = ()
) -> list[Sampled]:
    """One token for each row of `logits` [requests, vocab], under that request's SamplingParams.

    A request's draw depends on its own seed and place only, so other requests in the step change nothing. `seed` is the
    engine's, for requests without one. `eos_token_ids` end a sequence, and are not sampled before min_tokens.
    """
    # A step planned before the grammar's end was known has an output that no request takes.
    matchers = {row: r.matcher for row, r in enumerate(requests) if r.matcher is not None and not r.matcher.ended}
    biased = _biased(logits, requests, eos_token_ids)
    tokens = _choose(_allowed(_penalised(biased, requests), matchers), requests, seed)
    sampled = [Sampled(token) for token in tokens]
    with_logprobs = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if with_logprobs:
        counts = [requests[row].params.logprobs or 0 for row in with_logprobs]
        sampled_logprobs = logprobs_of(logits[with_logprobs], [tokens[row] for row in with_logprobs], counts)
        for row, logprobs in zip(with_logprobs, sampled_logprobs, strict=True):
            sampled[row] = Sampled(tokens[row], logprobs)
    for row, matcher in matchers.items():
        matcher.advance(tokens[row])
        sampled[row] = sampled[row]._replace(ends=matcher.ended, error=matcher.error)
    return sampled


def _allowed(logits: Tensor, matchers: Mapping[int, Matcher]) -> Tensor:
    """Return the logits, those of tokens that a row's matcher does not allow at -inf in a copy."""
    if not matchers:
        return logits
    masks = torch.frombuffer(bytearray(b"".join(matcher.mask for matcher in matchers.values())), dtype=torch.uint8)
    bits = (masks.view(len(matchers), -1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
    # A model may have more rows than its tokenizer has tokens.
    forbidden = torch.ones((len(matchers), logits.shape[1]), dtype=torch.bool)
    forbidden[:, : allowed.shape[1]] = ~allowed
    rows = list(matchers)
    changed = logits.clone()
    changed[rows] = logits[rows].masked_fill(forbidden.to(logits.device), float("-inf"))
    return changed


def _biased(logits: Tensor, requests: Sequence[SamplingTensors], eos_token_ids: Collection[int]) -> Tensor:
    """Return the logits, with logit_bias added and ends before min_tokens at -inf in a copy."""
    biases: list[tuple[int, int, float]] = []
    for row, (_, params, place, _, _, matcher) in enumerate(requests):
        biases += [(row, token, bias) for token, bias in params.logit_bias.items()]
        if place < params.min_tokens and matcher is None:
            ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids.union(eos_token_ids)
            biases += [(row, token, float("-inf")) for token in ends if token < logits.shape[1]]
    if not biases:
        return logits
    rows, tokens, values = zip(*biases, strict=True)
    changed = logits.float().clone()
    where = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
    return changed.index_put_(where, torch.tensor(values, device=logits.device), accumulate=True)


def _penalised(logits: Tensor, requests: Sequence[SamplingTensors]) -> Tensor:
    """Return the logits, those of penalised requests changed in a copy."""
    rows = [row for row, request in enumerate(requests) if request.params.penalises]
    if not rows:
        return logits
    logits = logits.float().clone()
    for row in rows:
        request, of_row = requests[row], logits[row]
        params = request.params
        seen = torch.tensor(list(set(request.token_ids)), device=logits.device)
        there = of_row[seen]
        of_row[seen] = torch.where(there > 0, there / params.repetition_penalty, there * params.repetition_penalty)
        output = torch.tensor(request.output_token_ids, dtype=torch.int64, device=logits.device)
        times = output.bincount(minlength=logits.shape[1])
        of_row -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
    return logits


def logprobs_of(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[list[Logprob]]:
    """For each row the chosen token, and then as many of the likeliest as its count."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = (logprobs >= own).sum(-1).tolist()
    top = logprobs.topk(min(max(counts), logits.shape[1]), dim=-1)
    return [
        [
            Logprob(token, value, rank),
            *(Logprob(*pair, place) for place, pair in enumerate(zip(ids[:count], values[:count], strict=True), 1)),
        ]
        for token, value, rank, count, ids, values in zip(
            tokens, own.squeeze(1).tolist(), ranks, counts, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]


def _choose(logits: Tensor, requests: Sequence[SamplingTensors], seed: int) -> list[int]:
    """Return the likeliest token for those whose temperature is 0, and a drawn one for the others."""
    tokens: list[int] = logits.argmax(-1).tolist()
    drawing = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawing:
        drawn = _draw(logits[drawing], [requests[row] for row in drawing], seed)
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, requests: Sequence[SamplingTensors], seed: int) -> list[int]:
    """By inverting the distribution function at a uniform number: min_p, top_k, then top_p of what is left."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    params = [request.params for request in requests]
    vocab = logits.shape[1]
    ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
    # From the largest down, so that no temperature overflows.
    scaled = (ordered - ordered[:, :1]) / column([p.temperature for p in params])
    outside_top_k = torch.arange(vocab, device=logits.device) >= column([p.top_k or vocab for p in params])
    # A share of the likeliest, whose logarithm is 0 here.
    scaled.masked_fill_(scaled < column([p.min_p for p in params]).log(), float("-inf"))
    probabilities = scaled.masked_fill_(outside_top_k, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    cumulative = probabilities.masked_fill_(before >= column([p.top_p for p in params]), 0).cumsum(-1)
    drawn = column([_uniform(request, seed) for request in requests]) * cumulative[:, -1:]
    ranks = torch.searchsorted(cumulative, drawn, right=True)
    tokens: list[int] = order.gather(1, ranks).squeeze(1).tolist()
    return tokens


def _uniform(request: SamplingTensors, seed: int) -> float:
    """From 0 to below 1, from the request's seed and how many tokens it has put out."""
    own = request.params.seed
    source = f"{seed} request {request.number}" if own is None else str(own)
    digest = blake2b(f"{source} token {request.place}".encode(), digest_size=8).digest()
    # 52 bits: times any total, the product stays below that total.
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)
