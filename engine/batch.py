"""A step's plan as tensors: which token of which request stands in which row, and where its keys and values go."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from engine.blocks.pool import NULL_BLOCK
from engine.models import ModelConfig
from engine.request import Request
from engine.scheduler import SchedulerOutput


class Decodes(NamedTuple):
    """Requests with one token each: the first rows of the batch, one a request."""

    block_tables: Tensor
    """[requests, blocks]"""
    seq_lens: Tensor
    """[requests]: tokens in the cache, this one included."""


class Chunks(NamedTuple):
    """Requests with about as many tokens as one another, padded to the longest, L."""

    rows: Tensor
    """[requests * L]: the row of each token; padding repeats a request's last."""
    kept: Tensor
    """[rows]: where, among `rows`, the tokens are that are no padding."""
    block_tables: Tensor
    """[requests, blocks]: those that any of its tokens sees; where a window has moved on, the first are left out."""
    visible: Tensor
    """[requests, 1, L, blocks * block_size]: whether a token sees a slot."""


class Batch(NamedTuple):
    """One row a token: decodes first, then chunks by length."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    """block * block_size + offset of each row's keys and values."""
    decodes: Decodes | None
    chunks: list[Chunks]
    windowed: list[Chunks]
    """The same rows, single tokens too, for layers with a sliding window. What no layer needs is None or empty."""
    sampled: list[Request]
    """Requests whose next token is to be sampled, in the order of the plan."""
    sampled_rows: Tensor
    """Their last rows."""


class _Share(NamedTuple):
    """A request's part of the plan."""

    request: Request
    start: int
    num_tokens: int
    table: list[int]


def lay_out(
    plan: SchedulerOutput, tables: Mapping[int, list[int]], block_size: int, device: str, model: ModelConfig
) -> Batch:
    """The plan's tokens as a batch on the device, with what the layers of `model` need."""
    some_see_all = len(model.sliding_layers) < model.num_layers
    shares = [
        _Share(request, request.num_computed_tokens, count, tables[request.number])
        for request, count in zip(plan.requests, plan.num_tokens, strict=True)
    ]
    # Chunks of one bit length are padded to the longest: to twice their own at most. Neighbours see equally far back.
    by_length = sorted(shares, key=lambda share: ((share.num_tokens - 1).bit_length(), share.start))
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: dict[int, int] = {}
    decodes: Decodes | None = None
    chunks: list[Chunks] = []
    windowed: list[Chunks] = []
    for bits, group in groupby(by_length, key=lambda share: (share.num_tokens - 1).bit_length()):
        members = list(group)
        first_row = len(token_ids)
        for request, start, count, table in members:
            token_ids += request.token_ids[start : start + count]
            positions += range(start, start + count)
            slots += [table[at // block_size] * block_size + at % block_size for at in range(start, start + count)]
            last_rows[request.number] = len(token_ids) - 1
        if some_see_all and bits == 0:
            lens = _int64([share.start + 1 for share in members], device)
            decodes = Decodes(_padded_tables(members, [0] * len(members), block_size, device), lens)
        elif some_see_all:
            chunks.append(_chunks(members, first_row, block_size, device, None))
        if model.sliding_layers:
            windowed.append(_chunks(members, first_row, block_size, device, model.sliding_window))
    sampled = [share.request for share in shares if share.start + share.num_tokens == share.request.num_tokens]
    return Batch(
        _int64(token_ids, device),
        _int64(positions, device),
        _int64(slots, device),
        decodes,
        chunks,
        windowed,
        sampled,
        _int64([last_rows[request.number] for request in sampled], device),
    )


def _chunks(members: list[_Share], first_row: int, block_size: int, device: str, window: int | None) -> Chunks:
    longest = max(share.num_tokens for share in members)
    rows: list[int] = []
    kept: list[int] = []
    seen: list[int] = []
    first_blocks: list[int] = []
    for index, share in enumerate(members):
        padding = longest - share.num_tokens
        kept += range(index * longest, index * longest + share.num_tokens)
        rows += [*range(first_row, first_row + share.num_tokens), *[first_row + share.num_tokens - 1] * padding]
        last = share.start + share.num_tokens - 1
        seen += [*range(share.start, last + 1), *[last] * padding]
        first_blocks.append(0 if window is None else max(0, share.start + 1 - window) // block_size)
        first_row += share.num_tokens
    block_tables = _padded_tables(members, first_blocks, block_size, device)
    first_slots = _int64(first_blocks, device).view(-1, 1, 1, 1) * block_size
    slots = first_slots + torch.arange(block_tables.shape[1] * block_size, device=device)
    positions = _int64(seen, device).view(len(members), 1, longest, 1)
    visible = slots <= positions
    if window is not None:
        visible &= slots > positions - window
    return Chunks(_int64(rows, device), _int64(kept, device), block_tables, visible)


def _padded_tables(members: list[_Share], first_blocks: list[int], block_size: int, device: str) -> Tensor:
    """[requests, blocks]: each table from its first block that counts, as many as the longest of them needs."""
    ends = [-(-(share.start + share.num_tokens) // block_size) for share in members]
    width = max(end - first for first, end in zip(first_blocks, ends, strict=True))
    flat: list[int] = []
    for share, first in zip(members, first_blocks, strict=True):
        blocks = share.table[first : first + width]
        flat += blocks
        flat += [NULL_BLOCK] * (width - len(blocks))
    return _int64(flat, device).view(len(members), width)


def _int64(values: list[int], device: str) -> Tensor:
    """As torch.tensor, in an eighth of the time."""
    if not values:
        return torch.empty(0, dtype=torch.int64, device=device)
    return torch.frombuffer(array("q", values), dtype=torch.int64).to(device)
