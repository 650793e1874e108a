"""KV cache groups for a bare scheduler, by short names, in whatever form the release of vLLM has them.

    ["full"] ["full", 16] ["sliding", 100] ["chunked", 128] ["mamba", "none"] ["mamba", "align", 64]

The last number is the group's own block size, where it is not the scheduler's.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

MAMBA_SHAPE = (16, 16)


def takes(called: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of `arguments` that it takes in this release of vLLM."""
    return {name: value for name, value in arguments.items() if name in _names_of_parameters(called)}


@functools.cache
def _names_of_parameters(called: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(called).parameters)


def cache_spec(group: Sequence[Any], block_size: int, drafts: int) -> Any:
    """Return the spec of one group. drafts: speculative tokens, for which Mamba layers keep blocks."""
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    kind, *rest = group
    if kind == "mamba":
        mode, *own = rest
        return kinds.MambaSpec(
            block_size=own[0] if own else block_size,
            shapes=(MAMBA_SHAPE,),
            dtypes=(torch.float32,),
            **takes(kinds.MambaSpec, mamba_cache_mode=mode, num_speculative_blocks=drafts),
        )
    attention = {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
    if kind == "full":
        size = rest[0] if rest else block_size
        return kinds.FullAttentionSpec(block_size=size, **attention, **takes(kinds.FullAttentionSpec, use_mla=False))
    width, *own = rest
    size = own[0] if own else block_size
    if kind == "sliding":
        more = takes(kinds.SlidingWindowSpec, use_mla=False)
        return kinds.SlidingWindowSpec(block_size=size, sliding_window=width, **attention, **more)
    more = takes(kinds.ChunkedLocalAttentionSpec, use_mla=False)
    return kinds.ChunkedLocalAttentionSpec(block_size=size, attention_chunk_size=width, **attention, **more)


def cache_config(groups: Sequence[Sequence[Any]], blocks: int, block_size: int, drafts: int) -> tuple[Any, int, int]:
    """Return the configuration of these groups over one pool, and the scheduler's and the hashes' block sizes."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    specs = [cache_spec(group, block_size, drafts) for group in groups]
    sizes = [spec.block_size for spec in specs]
    layers = [KVCacheGroupSpec([f"layer.{index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(blocks, [], layers), math.lcm(*sizes), math.gcd(*sizes)
