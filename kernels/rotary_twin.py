"""Rotary positions in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

from torch import Tensor


def rotary_torch(heads: Tensor, turns: Tensor) -> None:
    """Turn the heads as the kernel does, on any device and dtype."""
    cos, sin = turns.unsqueeze(2).unbind(1)
    partners = heads.roll(heads.shape[2] // 2, 2)
    heads.mul_(cos).addcmul_(partners, sin)
