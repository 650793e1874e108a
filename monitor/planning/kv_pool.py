"""A model's KV pool: its groups of layers, the bytes of a block, and the blocks that a request takes.

Layers of one kind share a block table and form one group. Where kinds differ, all pages are made equal, by more tokens
in a block or by padding, and each kind is split into groups of as many layers as the smallest kind has, or as the
largest has if that is under 1.5 times as many. Groups draw on the same blocks.
Source: vllm/v1/core/kv_cache_utils.py of 0.18, 0.32 and 0.33, with which tests/planning compares every figure.
"""

from __future__ import annotations

from collections import Counter
from math import lcm
from typing import Final

import msgspec

from ..base.errors import BadQuestion
from .model_shape import CacheKind, LayerCache, ModelShape

SIMILAR: Final = 1.5
"""From vLLM: up to this ratio the smaller kind is padded instead of the larger one split."""
LATENT_KERNEL_BLOCK: Final = 128
KERNEL_BLOCK: Final = 16
"""Tokens: blocks of a hybrid model are a multiple of what the attention kernels take (FlashAttention, from vLLM)."""
CHECKPOINTS_SINCE: Final = (0, 32)
"""The oldest release in which one more state of each Mamba-2 layer was seen."""
EVERY_BLOCK_UNTIL: Final = (0, 28)
"""The newest release that keeps a state for each block where prefixes are cached, in families that can."""
RESERVED_NULL_BLOCKS: Final = 1
"""vLLM's block 0 is never handed out."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the engine that decide sizes."""

    release: tuple[int, int] = (0, 33)
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    pipeline_parallel: int = 1
    prefix_caching: bool = True
    steps_in_flight: int = 1
    """2 with asynchronous scheduling: what a step computes leaves a window only once the next was planned."""
    kernel_block: int = KERNEL_BLOCK


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table."""

    kind: CacheKind
    layers: int
    block_size: int
    reach: int = 0
    state_blocks: int = 0
    """For a state, how many a request has (0: one for each block of its tokens)."""

    def blocks_of(self, tokens: int, in_flight: int) -> int:
        """Return the most blocks that a request of so many tokens has at once.

        in_flight: tokens of the steps under way, which a window keeps beside itself.
        """
        match self.kind:
            case CacheKind.STATE:
                return self.state_blocks or -(-tokens // self.block_size)
            case CacheKind.WINDOW:
                return -(-min(self.reach - 1 + in_flight, tokens) // self.block_size) + 1
            case CacheKind.CHUNK:
                return -(-min(self.reach + in_flight, tokens) // self.block_size)
            case _:
                return -(-tokens // self.block_size)


class KvPool(msgspec.Struct, frozen=True, kw_only=True):
    """The pool's geometry on one rank."""

    groups: tuple[CacheGroup, ...]
    bytes_per_block: int
    block_size: int
    """Tokens, after it was aligned with the states of a hybrid model."""
    in_flight: int

    def blocks_of(self, tokens: int) -> int:
        """Return the most blocks that a request of so many tokens takes, in all groups."""
        return sum(group.blocks_of(tokens, self.in_flight) for group in self.groups)

    def shared_blocks(self, prefix: int) -> int:
        """Return how many blocks requests with a common prefix of so many tokens share: full attention's whole ones."""
        return sum(prefix // group.block_size for group in self.groups if group.kind == CacheKind.FULL)

    def longest(self, blocks: int, limit: int) -> int:
        """Return the tokens of the longest request, up to `limit`, that this many blocks hold, or 0 if none fits."""
        if blocks < self.blocks_of(1):
            return 0
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_of(middle) <= blocks else (low, middle - 1)
        return low


def pool_of(shape: ModelShape, settings: EngineSettings) -> KvPool:
    """Return the geometry of the pool. Raises BadQuestion for a block size below 1 or a model that keeps nothing."""
    if settings.block_size < 1:
        raise BadQuestion(f"a block has at least 1 token, not {settings.block_size}")
    if not shape.layers:
        raise BadQuestion(f"{shape.family} keeps nothing for a request: it has no KV pool")
    kinds = Counter(shape.layers)
    per_token = max((layer.bytes_per_token for layer in kinds), default=0)
    aligned = (
        max(
            (_aligned(layer, per_token, shape.is_latent, settings) for layer in kinds if layer.kind == CacheKind.STATE),
            default=0,
        )
        if per_token
        else 0
    )
    block_size = max(settings.block_size, aligned)
    page = max([block_size * per_token, *(layer.state_bytes for layer in kinds)])
    if len(kinds) == 1:
        group_size = len(shape.layers)
    else:
        fewest, most = min(kinds.values()), max(kinds.values())
        group_size = most if most < fewest * SIMILAR else fewest
    groups: list[CacheGroup] = []
    for layer, count in kinds.items():
        parts = -(-count // group_size)
        groups += [
            _cache_group(layer, len(range(part, count, parts)), block_size, aligned or block_size, page, settings)
            for part in range(parts)
        ]
    stages = settings.pipeline_parallel
    widest = max(-(-group.layers // stages) for group in groups)
    return KvPool(
        groups=tuple(groups),
        bytes_per_block=widest * page,
        block_size=block_size,
        in_flight=settings.max_num_batched_tokens * settings.steps_in_flight,
    )


def _aligned(state: LayerCache, per_token: int, latent: bool, settings: EngineSettings) -> int:
    """Tokens of a block of attention whose page has room for that state."""
    step = max(settings.kernel_block, LATENT_KERNEL_BLOCK if latent else 0)
    if _keeps_every_block(state, settings):
        step = lcm(state.chunk, step)
    elif settings.release >= CHECKPOINTS_SINCE:
        step = max(step, settings.block_size)
    return step * -(-state.state_bytes // (step * per_token))


def _keeps_every_block(state: LayerCache, settings: EngineSettings) -> bool:
    return state.every_block and settings.prefix_caching and settings.release <= EVERY_BLOCK_UNTIL


def _cache_group(
    layer: LayerCache, layers: int, block_size: int, state_block_size: int, page: int, settings: EngineSettings
) -> CacheGroup:
    if layer.kind == CacheKind.STATE:
        kept = 1
        if _keeps_every_block(layer, settings):
            kept, block_size = 0, state_block_size
        elif settings.prefix_caching:
            kept = 3 if layer.checkpoints and settings.release >= CHECKPOINTS_SINCE else 2
        return CacheGroup(kind=layer.kind, layers=layers, block_size=block_size, state_blocks=kept)
    own = block_size * layer.bytes_per_token
    more = page // own if page % own == 0 else 1  # a page that does not divide the largest is padded
    return CacheGroup(kind=layer.kind, layers=layers, block_size=block_size * more, reach=layer.reach)
