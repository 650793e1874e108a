"""The interface of models and the runner, and the shared parts of layers: norms, rotary positions, the order of
weights.

Sizes in docstrings: N tokens of a step, over all its requests. H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from kvscope.kernels import run_on
from kvscope.kernels.rms_norm_twin import rms_norm_torch
from kvscope.kernels.rotary_twin import rotary_torch


class LayerGroup(NamedTuple):
    """Layers that keep the same tokens, and so share block tables: all of them, or the last `window` only."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ModelConfig:
    """A model's shape. `max_model_len` is what the engine serves: as set, or the model's own.

    In `sliding_layers` a token sees the last `sliding_window` tokens only, itself included.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    sliding_window: int | None = None
    sliding_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key-value heads evenly")

    @property
    def kv_groups(self) -> list[LayerGroup]:
        """The layers with full attention, then those with a sliding window. A model with one kind has one group."""
        full = tuple(layer for layer in range(self.num_layers) if layer not in self.sliding_layers)
        groups = LayerGroup(None, full), LayerGroup(self.sliding_window, tuple(sorted(self.sliding_layers)))
        return [group for group in groups if group.layers]

    @property
    def layers_per_block(self) -> int:
        """Layers that a block has room for: as many as the largest group has."""
        return max(len(group.layers) for group in self.kv_groups)


class Attend(Protocol):
    """Keeps a layer's keys and values in the paged cache and attends over what each token may see there."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Map query [N, H, D], key and value [N, K, D] to a result [N, H * D]."""
        ...


class Model(Protocol):
    """A decoder over a flat batch of tokens, whatever requests they belong to."""

    config: ModelConfig

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [N, hidden] after the last norm, from ids and positions [N], both int64."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocab] from the hidden states [n, hidden] of those tokens whose successor is wanted."""
        ...

    def weights(self) -> Iterator[Tensor]:
        """Every weight once."""
        ...


class RMSNorm(Protocol):
    """The kernel, or its twin."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, epsilon: float, delta: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """See kernels/__init__.py."""
        ...


def rms_norm_on(device: str) -> RMSNorm:
    """Return the kernel where it runs, or else its twin."""
    if run_on(device):
        # Triton is there where there is a GPU for it.
        from kvscope.kernels.rms_norm import rms_norm

        return rms_norm
    return rms_norm_torch


def by_inputs(weight: Tensor) -> Tensor:
    """Return the same weight [out, in], in memory as [in, out] for fp32 on a CPU.

    There a product of few tokens with it is quicker, by a tenth to three times, and in 16 bits it is not.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        return weight.t().contiguous().t()
    return weight.contiguous()


_ROTARY_PARAMETERS: Final = frozenset(["rope_theta", "rope_type", "type", "partial_rotary_factor"])
_SCALING_PARAMETERS: Final = {
    "default": frozenset[str](),
    "linear": frozenset(["factor"]),
    "llama3": frozenset(["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
}
"""The parameters that each kind of scaling requires."""


class Rotary:
    """Rotary positions in the halves layout: dimension i turns with i + D / 2.

    `parameters` as a Hugging Face config has them: rope_theta, rope_type and what the type needs, no more. Raises
    ValueError for a type that is not default, linear (https://arxiv.org/abs/2306.15595) or llama3 (Llama 3.1's own),
    and for parameters that are missing or too many.
    """

    def __init__(
        self, parameters: Mapping[str, Any], head_size: int, max_len: int, dtype: torch.dtype, device: str
    ) -> None:
        kind = parameters["rope_type"]
        if kind not in _SCALING_PARAMETERS:
            raise ValueError(f"RoPE scaling {kind!r} is not supported; there are {', '.join(_SCALING_PARAMETERS)}")
        if parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError("RoPE over a part of each head (partial_rotary_factor) is not supported")
        needed = _SCALING_PARAMETERS[kind]
        if missing := sorted(needed - parameters.keys()):
            raise ValueError(f"RoPE scaling {kind!r} needs {', '.join(missing)}")
        if unknown := sorted(parameters.keys() - needed - _ROTARY_PARAMETERS):
            raise ValueError(f"RoPE scaling {kind!r} does not know {', '.join(unknown)}, which may change its tokens")
        # float32 throughout and in this order, as the checkpoints were trained: the last bits of an angle count.
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
        frequencies = 1.0 / (float(parameters["rope_theta"]) ** exponents)
        if kind == "linear":
            frequencies = frequencies / float(parameters["factor"])
        elif kind == "llama3":
            frequencies = _llama3(frequencies, parameters)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        # The first half of the turned vector subtracts, so its sines carry the sign.
        table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)
        self._table = table.to(device, dtype)
        self._rotary = rotary_torch
        if run_on(device):
            from kvscope.kernels.rotary import rotary

            self._rotary = rotary

    def at(self, positions: Tensor) -> Tensor:
        """Cosines and signed sines of these positions: [N, 2, D]."""
        return self._table.index_select(0, positions)

    def turn(self, heads: Tensor, turns: Tensor) -> None:
        """Turn `heads` [N, any, D] in place by what `at` gave."""
        self._rotary(heads, turns)


def _llama3(frequencies: Tensor, parameters: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, and those between blended."""
    factor, low, high = (float(parameters[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained_len = float(parameters["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (trained_len / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    scaled = torch.where(wavelengths > trained_len / low, frequencies / factor, blended)
    return torch.where(wavelengths < trained_len / high, frequencies, scaled)
