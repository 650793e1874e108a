"""The differences between the architectures of the Llama family: biases, norms of heads, sliding windows.

Windows and defaults are read as transformers reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvscope.engine.models.checkpoint import Checkpoint

_SLIDING, _FULL = "sliding_attention", "full_attention"
_DEFAULT_WINDOW: Final = 4096
_DEFAULT_FIRST_SLIDING_LAYER: Final = 28


class SlidingWindow(NamedTuple):
    """A token in these layers sees the last `tokens` only, itself included."""

    tokens: int | None = None
    layers: frozenset[int] = frozenset()


class Traits(NamedTuple):
    """Which biases there are, whether query and key heads have a norm of their own, and what window there is."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    window: SlidingWindow = SlidingWindow()


def _llama(checkpoint: Checkpoint) -> Traits:
    checkpoint.require("model_type", "llama")
    checkpoint.require("rope_interleaved", False)
    checkpoint.require("use_sliding_window", False)
    attention_bias = bool(checkpoint.setting("attention_bias", False))
    return Traits(attention_bias, attention_bias, bool(checkpoint.setting("mlp_bias", False)))


def _mistral(checkpoint: Checkpoint) -> Traits:
    checkpoint.require("model_type", "mistral")
    layers = range(int(checkpoint.setting("num_hidden_layers")))
    tokens = checkpoint.setting_or_null("sliding_window", _DEFAULT_WINDOW)
    if tokens is None:
        checkpoint.require("layer_types", [_FULL for _ in layers])
        return Traits()
    # With a pattern by layers, releases of transformers disagree on what this architecture does.
    checkpoint.require("layer_types", [_SLIDING for _ in layers])
    return Traits(window=_sliding_window(checkpoint, tokens, frozenset(layers)))


def _qwen2(checkpoint: Checkpoint) -> Traits:
    checkpoint.require("model_type", "qwen2")
    checkpoint.require("use_mrope", False)
    return Traits(qkv_bias=True, window=_qwen_window(checkpoint))


def _qwen3(checkpoint: Checkpoint) -> Traits:
    checkpoint.require("model_type", "qwen3")
    bias = bool(checkpoint.setting("attention_bias", False))
    return Traits(qkv_bias=bias, out_bias=bias, head_norms=True, window=_qwen_window(checkpoint))


def _qwen_window(checkpoint: Checkpoint) -> SlidingWindow:
    """Return the window of layers from max_window_layers on, if it is in use, unless layer_types sets it by layer."""
    tokens = checkpoint.setting_or_null("sliding_window", _DEFAULT_WINDOW)
    if not checkpoint.setting("use_sliding_window", False):
        tokens = None
    first = int(checkpoint.setting("max_window_layers", _DEFAULT_FIRST_SLIDING_LAYER))
    layers = range(int(checkpoint.setting("num_hidden_layers")))
    by_position = [_FULL if tokens is None or layer < first else _SLIDING for layer in layers]
    types = checkpoint.setting("layer_types", by_position)
    if len(types) != len(layers) or not set(types) <= {_FULL, _SLIDING}:
        raise ValueError(
            f"layer_types of {checkpoint.name} is {types!r}; it must be {_FULL} or {_SLIDING} for each of"
            f" {len(layers)} layers"
        )
    sliding = frozenset(layer for layer in layers if types[layer] == _SLIDING)
    if not sliding:
        return SlidingWindow()
    if tokens is None:
        raise ValueError(
            f"layer_types of {checkpoint.name} has {_SLIDING}, but use_sliding_window and sliding_window give no window"
        )
    return _sliding_window(checkpoint, tokens, sliding)


def _sliding_window(checkpoint: Checkpoint, tokens: int, layers: frozenset[int]) -> SlidingWindow:
    if tokens < 1:
        raise ValueError(f"sliding_window of {checkpoint.name} is {tokens} and must be at least 1, or null for none")
    return SlidingWindow(int(tokens), layers)


TRAITS: Final[dict[str, Callable[[Checkpoint], Traits]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
