"""RMSNorm in plain torch. Shapes are those of kernels/__init__.py."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm_torch(
    hidden: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute the same as the kernel, on any device and dtype."""
    if delta is not None:
        hidden += delta
    normed = functional.rms_norm(hidden, weight.shape, weight, epsilon)
    return normed if out is None else out.copy_(normed)
