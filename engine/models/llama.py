"""The Llama family: Llama, Mistral, Qwen2, Qwen3. Grouped-query attention, rotary positions, gated MLP.

Its architectures differ in biases, norms of heads and sliding windows. Windows and defaults are read as transformers
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from .checkpoint import Checkpoint
from .layers import Attend, ModelConfig, Rotary, by_inputs, rms_norm_on

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


class _LlamaLayer(NamedTuple):
    """Weights [out, in]. Those that read the same input are one, because few large products are quicker."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Llama:
    """The model in `checkpoint`, whose weights it takes. Raises ValueError for what it does not support."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int | None) -> None:
        architecture = checkpoint.config["architectures"][0]
        self._traits = TRAITS[architecture](checkpoint)
        checkpoint.require("hidden_act", "silu")
        self._hidden = int(checkpoint.setting("hidden_size"))
        heads = int(checkpoint.setting("num_attention_heads"))
        self.config = ModelConfig(
            architecture=architecture,
            num_layers=int(checkpoint.setting("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(checkpoint.setting("num_key_value_heads", heads)),
            head_size=int(checkpoint.setting("head_dim", self._hidden // heads)),
            vocab_size=int(checkpoint.setting("vocab_size")),
            max_model_len=checkpoint.max_model_len("max_position_embeddings", max_model_len),
            eos_token_ids=checkpoint.eos_token_ids(),
            sliding_window=self._traits.window.tokens,
            sliding_layers=self._traits.window.layers,
        )
        self._epsilon = float(checkpoint.setting("rms_norm_eps"))
        self._rms_norm = rms_norm_on(checkpoint.device)
        self._rotary = Rotary(
            _rope_parameters(checkpoint),
            self.config.head_size,
            self.config.max_model_len,
            checkpoint.dtype,
            checkpoint.device,
        )
        vocabulary = (self.config.vocab_size, self._hidden)
        self._embedding = checkpoint.take("model.embed_tokens.weight", *vocabulary)
        self._layers = [self._take_layer(checkpoint, index) for index in range(self.config.num_layers)]
        self._norm = checkpoint.take("model.norm.weight", self._hidden)
        self._head = checkpoint.take_head(self._embedding, tied=False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        norm, epsilon = self._rms_norm, self._epsilon
        heads = self.config.num_heads
        turned_heads = heads + self.config.num_kv_heads
        shape = (-1, turned_heads + self.config.num_kv_heads, self.config.head_size)
        turns = self._rotary.at(positions)
        hidden = embedding(token_ids, self._embedding)
        # The output of the last layer, which the next norm adds to the hidden states.
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = norm(hidden, layer.attention_norm, epsilon, delta)
            qkv = linear(normed, layer.qkv, layer.qkv_bias).view(shape)
            query, key, value = qkv[:, :heads], qkv[:, heads:turned_heads], qkv[:, turned_heads:]
            if layer.query_norm is not None and layer.key_norm is not None:
                # Each head is normed on its own.
                norm(query, layer.query_norm, epsilon, out=query)
                norm(key, layer.key_norm, epsilon, out=key)
            self._rotary.turn(qkv[:, :turned_heads], turns)
            delta = linear(attend(index, query, key, value), layer.out, layer.out_bias)
            normed = norm(hidden, layer.mlp_norm, epsilon, delta)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, 1)
            delta = linear(silu(gate) * up, layer.down, layer.down_bias)
        return norm(hidden, self._norm, epsilon, delta)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return linear(hidden, self._head)

    def weights(self) -> Iterator[Tensor]:
        """See Model."""
        yield self._embedding
        yield self._norm
        if self._head is not self._embedding:
            yield self._head
        for layer in self._layers:
            yield from (weight for weight in layer if weight is not None)

    def _take_layer(self, checkpoint: Checkpoint, index: int) -> _LlamaLayer:
        config, hidden, traits = self.config, self._hidden, self._traits
        inner = int(checkpoint.setting("intermediate_size"))
        query = config.num_heads * config.head_size
        key = config.num_kv_heads * config.head_size
        prefix = f"model.layers.{index}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = [f"{attention}.{name}.weight" for name in ("q_norm", "k_norm")] if traits.head_norms else []
        query_norm, key_norm = [checkpoint.take(name, config.head_size) for name in norms] or (None, None)
        projections = {"q_proj": query, "k_proj": key, "v_proj": key}
        gates = {"gate_proj": inner, "up_proj": inner}
        return _LlamaLayer(
            attention_norm=checkpoint.take(f"{prefix}.input_layernorm.weight", hidden),
            qkv=_take_joined(checkpoint, attention, projections, hidden),
            qkv_bias=_take_joined_bias(checkpoint, attention, projections) if traits.qkv_bias else None,
            query_norm=query_norm,
            key_norm=key_norm,
            out=by_inputs(checkpoint.take(f"{attention}.o_proj.weight", hidden, query)),
            out_bias=_take_joined_bias(checkpoint, attention, {"o_proj": hidden}) if traits.out_bias else None,
            mlp_norm=checkpoint.take(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=_take_joined(checkpoint, mlp, gates, hidden),
            gate_up_bias=_take_joined_bias(checkpoint, mlp, gates) if traits.mlp_bias else None,
            down=by_inputs(checkpoint.take(f"{mlp}.down_proj.weight", hidden, inner)),
            down_bias=_take_joined_bias(checkpoint, mlp, {"down_proj": hidden}) if traits.mlp_bias else None,
        )


def _take_joined(checkpoint: Checkpoint, prefix: str, sizes: dict[str, int], inputs: int) -> Tensor:
    weights = [checkpoint.take(f"{prefix}.{name}.weight", size, inputs) for name, size in sizes.items()]
    return by_inputs(torch.cat(weights))


def _take_joined_bias(checkpoint: Checkpoint, prefix: str, sizes: dict[str, int]) -> Tensor:
    return torch.cat([checkpoint.take(f"{prefix}.{name}.bias", size) for name, size in sizes.items()])


def _rope_parameters(checkpoint: Checkpoint) -> dict[str, object]:
    """Return one map, as new releases write it. Older ones have rope_theta and rope_scaling, with `type` for
    rope_type.
    """
    new = checkpoint.setting("rope_parameters", {})
    parameters = dict(checkpoint.setting("rope_scaling", {}) or new)
    parameters.setdefault("rope_theta", checkpoint.setting("rope_theta", 10_000.0))
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    if parameters["rope_type"] == "llama3":
        parameters.setdefault("original_max_position_embeddings", checkpoint.setting("max_position_embeddings"))
    return parameters
