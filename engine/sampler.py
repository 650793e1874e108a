"""Chooses each request's next token from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from engine.request import Request


def sample(logits: Tensor, requests: Sequence[Request], seed: int) -> list[int]:
    """One token for each row of `logits` [requests, vocab], under that request's SamplingParams.

    What a request draws depends on its own seed and place only, so whoever shares the step changes nothing. `seed` is
    the engine's, for requests without one.
    """
    tokens: list[int] = logits.argmax(-1).tolist()
    drawing = [row for row, request in enumerate(requests) if request.params.temperature > 0]
    if drawing:
        drawn = _draw(logits[drawing], [requests[row] for row in drawing], seed)
        for row, token in zip(drawing, drawn, strict=True):
            tokens[row] = token
    return tokens


def _draw(logits: Tensor, requests: Sequence[Request], seed: int) -> list[int]:
    """By inverting the distribution function at a uniform number: first top_k, then top_p of what is left."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    params = [request.params for request in requests]
    vocab = logits.shape[1]
    ordered, order = logits.double().sort(dim=-1, descending=True, stable=True)
    # From the largest down, so that no temperature overflows.
    scaled = (ordered - ordered[:, :1]) / column([p.temperature for p in params])
    outside_top_k = torch.arange(vocab, device=logits.device) >= column([p.top_k or vocab for p in params])
    probabilities = scaled.masked_fill_(outside_top_k, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    cumulative = probabilities.masked_fill_(before >= column([p.top_p for p in params]), 0).cumsum(-1)
    drawn = column([_uniform(request, seed) for request in requests]) * cumulative[:, -1:]
    ranks = torch.searchsorted(cumulative, drawn, right=True)
    tokens: list[int] = order.gather(1, ranks).squeeze(1).tolist()
    return tokens


def _uniform(request: Request, seed: int) -> float:
    """From 0 to below 1, from the request's seed and how many tokens it has put out."""
    own = request.params.seed
    source = f"{seed} request {request.number}" if own is None else str(own)
    digest = blake2b(f"{source} token {len(request.output_token_ids)}".encode(), digest_size=8).digest()
    # 52 bits: times any total, the product stays below that total.
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)
