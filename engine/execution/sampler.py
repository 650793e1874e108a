"""Chooses each request's next token from its logits, and reports how likely it was.

min_tokens, logit_bias, penalties, min_p, top_k and top_p go in vLLM's order, and mean what they mean there. A grammar
lets the tokens be chosen that it allows, and moves on with the one that is.

All of it runs on the device, and the host does not wait: what a step needs is in its upload, the tokens stay on the
device for the next step, and `Chosen.home` brings them to the host when they are asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..requests.request import Logprob, Request, Sampled
from ..requests.structured_output import Matcher
from .upload import Upload

TOKENS_SUMMED: Final = 256
"""Tokens whose probabilities are summed together, before one of them is looked for."""
COLDEST: Final = 1e-30
"""Temperatures below it would be 0 in float32. Nothing but the likeliest is left long before."""


class Draws(NamedTuple):
    """How rows are drawn, each tensor [rows, 1]. Rows of temperature 0 are greedy."""

    candidates: int
    """How many of the likeliest tokens the filters have to know of any row. 0: no row has a filter."""
    uniform: Tensor
    """0 to below 1, of the request's seed and place alone."""
    temperature: Tensor
    top_k: Tensor
    """0: all."""
    top_p: Tensor
    min_p: Tensor


class Penalties(NamedTuple):
    """Penalised rows, and the tokens that were there already. `prompt_of`, `output_of`, `carried_of`: whose each is, as
    a place in `rows`.
    """

    rows: Tensor
    factors: Tensor
    """[3, rows]: repetition, frequency and presence penalty."""
    prompts: Tensor
    prompt_of: Tensor
    outputs: Tensor
    output_of: Tensor
    carried: Tensor
    """Places in what the step before chose, of outputs that the host does not know."""
    carried_of: Tensor


class SamplingBatch(NamedTuple):
    """The requests whose next token is to be chosen, a row each. What no row needs is None."""

    numbers: list[int]
    rows: Tensor
    """Where in the batch the last token of each stands."""
    logprobs: list[int | None]
    """How many of the likeliest tokens are reported beside the chosen one. None: nothing is."""
    reported: Tensor
    """Rows of which something is."""
    matchers: Mapping[int, Matcher]
    """By row."""
    draws: Draws | None
    biases: tuple[Tensor, Tensor] | None
    """Places in the flat logits, and what is added there."""
    penalties: Penalties | None


class Likelihoods(NamedTuple):
    """Of rows: the log probability and the rank of a token, and the likeliest tokens with theirs."""

    own: Tensor
    ranks: Tensor
    likeliest: Tensor
    logprobs: Tensor

    def named(self, tokens: Sequence[int], counts: Sequence[int]) -> list[list[Logprob]]:
        """For each row the token itself, and then as many of the likeliest as its count."""
        lists = (part.tolist() for part in self)
        return [
            [
                Logprob(token, value, rank),
                *(Logprob(*pair, place) for place, pair in enumerate(zip(ids[:count], values[:count], strict=True), 1)),
            ]
            for token, count, value, rank, ids, values in zip(tokens, counts, *lists, strict=True)
        ]


class Chosen(NamedTuple):
    """What was chosen, on the device."""

    tokens: Tensor
    likelihoods: Likelihoods | None

    def home(self, sampling: SamplingBatch) -> Callable[[], list[Sampled]]:
        """Begin to copy it to the host. Return a function that waits for that, and gives each row's outcome."""
        on_gpu = self.tokens.is_cuda
        tokens = self.tokens.to("cpu", non_blocking=True)
        likelihoods = self.likelihoods
        if likelihoods is not None:
            likelihoods = Likelihoods(*(part.to("cpu", non_blocking=True) for part in likelihoods))
        copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if copied is not None:
            copied.record()

        def outcome() -> list[Sampled]:
            if copied is not None:
                copied.synchronize()
            return _outcome(tokens.tolist(), likelihoods, sampling)

        return outcome


def _outcome(tokens: list[int], likelihoods: Likelihoods | None, sampling: SamplingBatch) -> list[Sampled]:
    sampled = [Sampled(token) for token in tokens]
    if likelihoods is not None:
        counts = {row: count for row, count in enumerate(sampling.logprobs) if count is not None}
        named = likelihoods.named([tokens[row] for row in counts], list(counts.values()))
        for row, logprobs in zip(counts, named, strict=True):
            sampled[row] = Sampled(tokens[row], logprobs)
    for row, matcher in sampling.matchers.items():
        # A step planned before the grammar's end was known has an output that no request takes.
        if not matcher.ended:
            matcher.advance(tokens[row])
            sampled[row] = sampled[row]._replace(ends=matcher.ended, error=matcher.error)
    return sampled


def lay_out_sampling(
    requests: Sequence[Request],
    rows: Sequence[int],
    seed: int,
    eos_token_ids: Collection[int],
    vocab_size: int,
    upload: Upload,
    before: Mapping[int, int],
) -> Callable[[Tensor], SamplingBatch]:
    """Add to the upload what choosing these requests' next tokens needs. Return how to find it on the device.

    rows: where in the batch their last tokens stand. before: where in what the step before chose the last token of a
    request is, by its number, if the host does not know it. A request's draw depends on its own seed and place only, so
    other requests in the step change nothing. `seed` is the engine's, for requests without one. `eos_token_ids` end a
    sequence, and are not sampled before min_tokens.
    """
    logprobs = [request.params.logprobs for request in requests]
    at_rows, at_reported = upload.ints(rows), upload.ints([r for r, count in enumerate(logprobs) if count is not None])
    draws = _lay_out_draws(requests, seed, vocab_size, upload)
    biases = _lay_out_biases(requests, eos_token_ids, vocab_size, upload)
    penalties = _lay_out_penalties(requests, upload, before)
    numbers = [request.number for request in requests]
    matchers = {row: request.matcher for row, request in enumerate(requests) if request.matcher is not None}
    return lambda sent: SamplingBatch(
        numbers,
        at_rows(sent),
        logprobs,
        at_reported(sent),
        matchers,
        draws and draws(sent),
        biases and biases(sent),
        penalties and penalties(sent),
    )


def _lay_out_draws(
    requests: Sequence[Request], seed: int, vocab_size: int, upload: Upload
) -> Callable[[Tensor], Draws] | None:
    every = [request.params for request in requests]
    drawing = [params for params in every if params.temperature > 0]
    if not drawing:
        return None
    columns = [
        upload.floats(values)
        for values in (
            [_uniform(request, seed) for request in requests],
            [params.temperature for params in every],
            [params.top_k for params in every],
            [params.top_p for params in every],
            [params.min_p for params in every],
        )
    ]
    # All of them for top_p alone: how many tokens it takes is not known before.
    needed = [params.top_k or vocab_size * (params.top_p < 1) for params in drawing]
    candidates = min(vocab_size, max(needed)) or int(any(params.min_p for params in drawing))
    return lambda sent: Draws(candidates, *(column(sent)[:, None] for column in columns))


def _lay_out_biases(
    requests: Sequence[Request], eos_token_ids: Collection[int], vocab_size: int, upload: Upload
) -> Callable[[Tensor], tuple[Tensor, Tensor]] | None:
    biases: list[tuple[int, float]] = []
    for row, request in enumerate(requests):
        params, first = request.params, row * vocab_size
        biases += [(first + token, bias) for token, bias in params.logit_bias.items()]
        if _place(request) < params.min_tokens and request.matcher is None:
            ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids.union(eos_token_ids)
            biases += [(first + token, float("-inf")) for token in ends if token < vocab_size]
    if not biases:
        return None
    places, values = zip(*biases, strict=True)
    at_places, at_values = upload.ints(places), upload.floats(values)
    return lambda sent: (at_places(sent), at_values(sent))


def _lay_out_penalties(
    requests: Sequence[Request], upload: Upload, before: Mapping[int, int]
) -> Callable[[Tensor], Penalties] | None:
    rows = [row for row, request in enumerate(requests) if request.params.penalises]
    if not rows:
        return None
    penalised = [requests[row] for row in rows]
    prompts, outputs = array("q"), array("q")
    for request in penalised:
        prompts.extend(request.token_ids[: request.num_prompt_tokens])
        outputs.extend(request.output_token_ids)
    params = [request.params for request in penalised]
    carried = {place: before[r.number] for place, r in enumerate(penalised) if r.number in before}
    at_rows = upload.ints(rows)
    factors = upload.floats(
        [p.repetition_penalty for p in params]
        + [p.frequency_penalty for p in params]
        + [p.presence_penalty for p in params]
    )
    at_prompts, prompt_lens = upload.ints(prompts), upload.ints([r.num_prompt_tokens for r in penalised])
    at_outputs, output_lens = upload.ints(outputs), upload.ints([len(r.output_token_ids) for r in penalised])
    at_carried, carried_of = upload.ints(list(carried.values())), upload.ints(list(carried))
    return lambda sent: Penalties(
        at_rows(sent),
        factors(sent).view(3, -1).float(),
        at_prompts(sent),
        torch.repeat_interleave(prompt_lens(sent), output_size=len(prompts)),
        at_outputs(sent),
        torch.repeat_interleave(output_lens(sent), output_size=len(outputs)),
        at_carried(sent),
        carried_of(sent),
    )


def _place(request: Request) -> int:
    """How many output tokens come before the one that is to be chosen: those of the steps in flight too."""
    return len(request.output_token_ids) + request.num_output_placeholders


def _uniform(request: Request, seed: int) -> float:
    """From 0 to below 1, from the request's seed and how many tokens it has put out."""
    own = request.params.seed
    source = f"{seed} request {request.number}" if own is None else str(own)
    digest = blake2b(f"{source} token {_place(request)}".encode(), digest_size=8).digest()
    # 52 bits: times any total, the product stays below that total.
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)


def choose(logits: Tensor, sampling: SamplingBatch, before: Tensor | None = None) -> Chosen:
    """One token for each row of `logits` [rows, vocab], and how likely it was by them.

    before: the tokens that the step before chose, where it is not known to the host.
    """
    changed = logits
    if sampling.biases is not None:
        places, values = sampling.biases
        changed = changed.float().clone()
        changed.view(-1).index_add_(0, places, values.float())
    if sampling.penalties is not None:
        changed = _penalised(changed, sampling.penalties, before)
    changed = _allowed(changed, sampling.matchers)
    tokens = changed.argmax(-1)
    if sampling.draws is not None:
        tokens = torch.where(sampling.draws.temperature[:, 0] > 0, _draw(changed, sampling.draws), tokens)
    most = max((count for count in sampling.logprobs if count is not None), default=None)
    if most is None:
        return Chosen(tokens, None)
    return Chosen(tokens, likelihoods_of(logits[sampling.reported], tokens[sampling.reported], most))


def likelihoods_of(logits: Tensor, tokens: Tensor, most: int) -> Likelihoods:
    """How likely each row's token was, and the `most` likeliest of the row."""
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, tokens[:, None])
    top = logprobs.topk(min(most, logits.shape[1]), dim=-1)
    return Likelihoods(own[:, 0], (logprobs >= own).sum(-1), top.indices, top.values)


def _allowed(logits: Tensor, matchers: Mapping[int, Matcher]) -> Tensor:
    """Return the logits, those of tokens that a row's matcher does not allow at -inf in a copy."""
    ongoing = {row: matcher for row, matcher in matchers.items() if not matcher.ended}
    if not ongoing:
        return logits
    packed = torch.frombuffer(bytearray(b"".join(matcher.mask for matcher in ongoing.values())), dtype=torch.uint8)
    masks = packed.view(len(ongoing), -1, 1).to(logits.device)
    bits = masks >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1
    allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
    # A model may have more rows than its tokenizer has tokens.
    allowed = functional.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
    rows = torch.tensor(list(ongoing), device=logits.device)
    return logits.index_copy(0, rows, logits[rows].masked_fill(~allowed, float("-inf")))


def _penalised(logits: Tensor, penalties: Penalties, before: Tensor | None) -> Tensor:
    """Return the logits, those of penalised rows changed in a copy."""
    rows, factors, prompts, prompt_of, outputs, output_of, carried, carried_of = penalties
    vocab = logits.shape[1]
    if before is not None:
        outputs, output_of = torch.cat([outputs, before[carried]]), torch.cat([output_of, carried_of])
    times = torch.zeros((len(rows), vocab), device=logits.device)
    times.view(-1).index_add_(0, output_of * vocab + outputs, times.new_ones(len(outputs)))
    seen = times > 0
    seen.view(-1).index_fill_(0, prompt_of * vocab + prompts, True)
    repetition, frequency, presence = factors[:, :, None]
    there = logits[rows].float()
    there = torch.where(seen, torch.where(there > 0, there / repetition, there * repetition), there)
    there -= frequency * times + presence * (times > 0)
    return logits.float().index_copy(0, rows, there)


def _draw(logits: Tensor, draws: Draws) -> Tensor:
    """By inverting the distribution function, in the order of the vocabulary, at a uniform number."""
    # From the largest down, so that no temperature overflows.
    scaled = logits.float() - logits.amax(-1, keepdim=True).float()
    scaled /= draws.temperature.clamp(min=COLDEST).float()
    if draws.candidates:
        scaled.masked_fill_(scaled < _least_allowed(scaled, draws), float("-inf"))
    weights = functional.pad(scaled.exp_(), (0, -scaled.shape[1] % TOKENS_SUMMED)).view(len(scaled), -1, TOKENS_SUMMED)
    # First in which part of the vocabulary the number falls, then on which token there.
    sums = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    drawn = draws.uniform * sums[:, -1:]
    part = torch.searchsorted(sums, drawn, right=True).clamp_(max=sums.shape[1] - 1)
    within = weights.gather(1, part[:, :, None].expand(-1, 1, TOKENS_SUMMED))[:, 0].cumsum(-1, dtype=torch.float64)
    drawn -= functional.pad(sums, (1, 0)).gather(1, part)
    # The two sums of a part are rounded otherwise: a number must not fall behind its last token.
    token = torch.searchsorted(within, drawn.minimum(within[:, -1:] * (1 - 2**-50)), right=True)
    # Logits that are not numbers have no order: whatever is chosen then must be a token.
    return (part * TOKENS_SUMMED + token)[:, 0].clamp_(max=logits.shape[1] - 1)


def _least_allowed(scaled: Tensor, draws: Draws) -> Tensor:
    """Return the smallest of a row's `scaled` that min_p, top_k, and top_p of what is left, let be drawn: [rows, 1].

    It is a value and no place in an order: of equal tokens all are drawn or none, whatever else is in the step.
    """
    # A share of the likeliest, whose logarithm is 0 here.
    least = draws.min_p.log().float()
    ordered = scaled.topk(draws.candidates).values
    top_k = draws.top_k.long()
    last = ordered.gather(1, (top_k - 1).clamp(0, draws.candidates - 1))
    least = torch.where(top_k > 0, least.maximum(last), least)
    outside = ordered < least
    outside |= (torch.arange(draws.candidates, device=scaled.device) >= top_k) & (top_k > 0)
    probabilities = ordered.masked_fill(outside, float("-inf")).softmax(-1)
    before = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
    last = ordered.masked_fill_(outside | (before >= draws.top_p), float("inf")).amin(-1, keepdim=True)
    return torch.where(draws.top_p < 1, least.maximum(last), least)
