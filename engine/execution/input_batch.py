"""A step's plan as tensors: which token of which request stands in which row, and where its keys and values go."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kvscope.engine.blocks.block_pool import NULL_BLOCK
from kvscope.engine.execution.sampler import SamplingTensors
from kvscope.engine.requests.request_output import PromptLogprobs
from kvscope.engine.scheduling.step_plan import SchedulerOutput
from kvscope.kernels import run_on

UNKNOWN_TOKEN: Final = 0
"""Stands where the step before is still to sample."""


class Decodes(NamedTuple):
    """Requests with one token each: the first rows of the batch, one a request."""

    block_tables: Tensor
    """[requests, blocks]"""
    seq_lens: Tensor
    """[requests]: tokens in those blocks, this one included."""


class Chunks(NamedTuple):
    """Requests with about as many tokens as one another, padded to the longest, L."""

    rows: Tensor
    """[requests * L]: the row of each token. Padding repeats a request's last."""
    kept: Tensor
    """[rows]: where, among `rows`, the tokens are that are no padding."""
    block_tables: Tensor
    """[requests, blocks]"""
    visible: Tensor
    """[requests, 1, L, blocks * block_size]: whether a token sees a slot."""


class Prefills(NamedTuple):
    """Requests with several tokens each, for the kernel: all of them, unpadded."""

    first_row: int
    block_tables: Tensor
    """[requests, blocks]"""
    starts: Tensor
    """[requests + 1]: where each request's rows begin, counted from `first_row`, and the last one's end."""
    seq_lens: Tensor
    """[requests]: tokens in those blocks, these included."""
    longest: int


class Reach(NamedTuple):
    """The blocks that the batch's rows read in a layer. Blocks that a sliding window has left behind are not in these
    tables.

    Shares longer than a decode are in `prefills` where the kernels run, and else in `chunks`.
    """

    decodes: Decodes | None
    chunks: list[Chunks]
    prefills: Prefills | None


class InGroup(NamedTuple):
    """The blocks of one KV group that a step writes and reads."""

    slots: Tensor
    """block * block_size + offset of each row's keys and values."""
    reach: Reach


class PromptRows(NamedTuple):
    """Rows of one prompt from which the likelihood of its tokens is computed: each row's is that of the token after."""

    first_row: int
    token_ids: list[int]
    """The tokens after, of as many rows."""
    likeliest: int
    """How many of the likeliest are reported beside them."""
    into: PromptLogprobs
    place: int
    """Where in `into` the first of them belongs."""


class InputBatch(NamedTuple):
    """One row a token: decodes first, then chunks by length."""

    token_ids: Tensor
    carried: list[tuple[int, int]]
    """Rows, and the number of the request, of tokens that the step before is still to sample."""
    positions: Tensor
    groups: list[InGroup]
    """By the model's KV groups."""
    sampled: list[SamplingTensors]
    """Requests whose next token is to be sampled, in the order of the plan."""
    sampled_rows: Tensor
    """Their last rows."""
    prompts: Sequence[PromptRows] = ()


class _TokenRange(NamedTuple):
    """Consecutive tokens of a sequence and the blocks it lies in."""

    start: int
    num_tokens: int
    table: Sequence[int]


def lay_out(
    plan: SchedulerOutput,
    tables: Mapping[int, Sequence[Sequence[int]]],
    block_size: int,
    device: str,
    windows: Sequence[int | None],
) -> InputBatch:
    """Return the plan's tokens as a batch on the device.

    tables: of each request, by its number, a block table for each KV group. windows: of each group, how many tokens its
    layers see (None: all).
    """
    # Chunks of one bit length are padded to the longest: to twice their own at most. Neighbours see equally far back.
    by_length = sorted(plan.shares, key=lambda share: ((share.num_tokens - 1).bit_length(), share.start))
    token_ids: list[int] = []
    carried: list[tuple[int, int]] = []
    positions: list[int] = []
    last_rows: dict[int, int] = {}
    prompts: list[PromptRows] = []
    for request, start, count, *_ in by_length:
        if request.prompt_logprobs is not None and start < request.num_prompt_tokens - 1:
            after = request.token_ids[start + 1 : min(start + count + 1, request.num_prompt_tokens)]
            asked = request.params.prompt_logprobs or 0
            prompts.append(PromptRows(len(token_ids), after, asked, request.prompt_logprobs, start + 1))
        known = request.token_ids[start : start + count]
        if len(known) < count:
            carried.append((len(token_ids) + count - 1, request.number))
            known.append(UNKNOWN_TOKEN)
        token_ids += known
        positions += range(start, start + count)
        last_rows[request.number] = len(token_ids) - 1
    sampled = [share.request for share in plan.shares if share.samples]
    return InputBatch(
        _int64(token_ids, device),
        carried,
        _int64(positions, device),
        [
            _in_group(
                [
                    _TokenRange(share.start, share.num_tokens, tables[share.request.number][group])
                    for share in by_length
                ],
                block_size,
                device,
                window,
            )
            for group, window in enumerate(windows)
        ],
        [SamplingTensors.of(request) for request in sampled],
        _int64([last_rows[request.number] for request in sampled], device),
        prompts,
    )


def _in_group(by_length: list[_TokenRange], block_size: int, device: str, window: int | None) -> InGroup:
    slots: list[int] = []
    for start, count, table in by_length:
        slots += [table[at // block_size] * block_size + at % block_size for at in range(start, start + count)]
    return InGroup(_int64(slots, device), _reach(by_length, block_size, device, window))


def _reach(by_length: list[_TokenRange], block_size: int, device: str, window: int | None) -> Reach:
    decodes: Decodes | None = None
    chunks: list[Chunks] = []
    longer: list[_TokenRange] = []
    first_row = 0
    for bits, group in groupby(by_length, key=lambda share: (share.num_tokens - 1).bit_length()):
        members = [share if window is None else _within_window(share, block_size, window) for share in group]
        if bits == 0:
            lens = _int64([share.start + 1 for share in members], device)
            decodes = Decodes(_padded_tables(members, block_size, device), lens)
        elif run_on(device):
            longer += members
        else:
            chunks.append(_chunks(members, first_row, block_size, device, window))
        first_row += sum(share.num_tokens for share in members)
    return Reach(decodes, chunks, _prefills(longer, len(by_length) - len(longer), block_size, device))


def _prefills(members: list[_TokenRange], first_row: int, block_size: int, device: str) -> Prefills | None:
    if not members:
        return None
    counts = [share.num_tokens for share in members]
    starts = _int64([0, *accumulate(counts)], device)
    seq_lens = _int64([share.start + share.num_tokens for share in members], device)
    return Prefills(first_row, _padded_tables(members, block_size, device), starts, seq_lens, max(counts))


def _within_window(share: _TokenRange, block_size: int, window: int) -> _TokenRange:
    """Return the same as if the sequence began with the first block that the window of one of its tokens reaches."""
    behind = max(0, share.start + 1 - window) // block_size
    return share._replace(start=share.start - behind * block_size, table=share.table[behind:])


def _chunks(members: list[_TokenRange], first_row: int, block_size: int, device: str, window: int | None) -> Chunks:
    longest = max(share.num_tokens for share in members)
    rows: list[int] = []
    kept: list[int] = []
    seen: list[int] = []
    for index, share in enumerate(members):
        padding = longest - share.num_tokens
        kept += range(index * longest, index * longest + share.num_tokens)
        rows += [*range(first_row, first_row + share.num_tokens), *[first_row + share.num_tokens - 1] * padding]
        last = share.start + share.num_tokens - 1
        seen += [*range(share.start, last + 1), *[last] * padding]
        first_row += share.num_tokens
    block_tables = _padded_tables(members, block_size, device)
    slots = torch.arange(block_tables.shape[1] * block_size, device=device)
    positions = _int64(seen, device).view(len(members), 1, longest, 1)
    visible = slots <= positions
    if window is not None:
        visible &= slots > positions - window
    return Chunks(_int64(rows, device), _int64(kept, device), block_tables, visible)


def _padded_tables(members: list[_TokenRange], block_size: int, device: str) -> Tensor:
    """Return [requests, blocks], as many blocks as the longest sequence fills."""
    width = max(-(-(share.start + share.num_tokens) // block_size) for share in members)
    flat: list[int] = []
    for share in members:
        flat += share.table[:width]
        flat += [NULL_BLOCK] * (width - len(share.table))
    return _int64(flat, device).view(len(members), width)


def _int64(values: list[int], device: str) -> Tensor:
    """As torch.tensor, in an eighth of the time."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)
