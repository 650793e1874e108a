"""The write of new keys and values into the paged cache in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

from torch import Tensor


def kv_write_torch(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write both caches, as the kernel does, on any device and dtype."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)
