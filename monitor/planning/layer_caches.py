"""The cache of each layer of a model for a request, and its size in bytes.

Sources: vLLM's KV-cache specifications (vllm/v1/kv_cache_interface.py and layers/mamba/mamba_utils.py in 0.18, 0.32 and
0.33), with which tests/planning compares every size.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

MAMBA1_CHUNK: Final = 2048
"""Tokens: vLLM's choice for layers whose configuration has no chunk size."""


class CacheKind(enum.StrEnum):
    """How what a layer keeps grows with a request."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    STATE = "state"


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer on one tensor-parallel rank.

    bytes_per_token: of keys and values, 0 for a state. reach: tokens of the window or the chunk, 0 for the others.
    state_bytes: of one state. checkpoints: whether vLLM from 0.32 on keeps one more state for each request.
    every_block: whether vLLM up to 0.28 keeps a state for every block when prefixes are cached. chunk: tokens that its
    kernel computes at once then.
    """

    kind: CacheKind
    bytes_per_token: int = 0
    reach: int = 0
    state_bytes: int = 0
    checkpoints: bool = False
    every_block: bool = False
    chunk: int = 0


def attention(kv_heads: int, head_dim: int, item_bytes: int, tensor_parallel: int = 1, reach: int = 0) -> LayerCache:
    """Return the cache of multi-head or grouped-query attention: keys and values of the heads on one rank.

    reach: the sliding window in tokens, 0 without one. A rank holds at least one head.
    """
    heads = max(1, kv_heads // tensor_parallel)
    kind = CacheKind.WINDOW if reach else CacheKind.FULL
    return LayerCache(kind=kind, bytes_per_token=2 * heads * head_dim * item_bytes, reach=reach)


def latent_attention(rank: int, rope_dim: int, item_bytes: int) -> LayerCache:
    """Return the cache of multi-head latent attention: one vector a token, whole on every rank."""
    return LayerCache(kind=CacheKind.FULL, bytes_per_token=(rank + rope_dim) * item_bytes)


def mamba1(inner: int, state: int, kernel: int, item_bytes: int, tensor_parallel: int = 1) -> LayerCache:
    """Return the state of a Mamba layer: the convolution's last inputs, and the recurrent state."""
    width = inner // tensor_parallel
    total = width * (kernel - 1 + state) * item_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total, every_block=True, chunk=MAMBA1_CHUNK)


def mamba2(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    item_bytes: int,
    recurrent_bytes: int,
    chunk: int,
    tensor_parallel: int = 1,
) -> LayerCache:
    """Return the state of a Mamba-2 layer. Groups that do not divide by the ranks are copied to each rank.

    recurrent_bytes: of an item of the recurrent state, which some families keep in 32 bits.
    """
    copied = groups if groups % tensor_parallel == 0 else tensor_parallel
    width = (heads * head_dim + 2 * copied * state) // tensor_parallel
    recurrent = heads // tensor_parallel * head_dim * state
    total = width * (kernel - 1) * item_bytes + recurrent * recurrent_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total, checkpoints=True, every_block=True, chunk=chunk)


def gated_delta_net(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    item_bytes: int,
    recurrent_bytes: int,
    tensor_parallel: int = 1,
) -> LayerCache:
    """Return the state of a gated delta net layer, as Qwen3-Next has it."""
    width = (2 * key_heads * key_dim + value_heads * value_dim) // tensor_parallel
    recurrent = value_heads // tensor_parallel * value_dim * key_dim
    total = width * (kernel - 1) * item_bytes + recurrent * recurrent_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total)


def short_convolution(width: int, kernel: int, item_bytes: int, tensor_parallel: int = 1) -> LayerCache:
    """Return the state of a short convolution, as LFM2 has it: its last inputs."""
    return LayerCache(kind=CacheKind.STATE, state_bytes=width // tensor_parallel * (kernel - 1) * item_bytes)
