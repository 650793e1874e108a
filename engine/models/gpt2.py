"""GPT-2: learned positions, layer norms with bias, one head a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear

from .checkpoint import Checkpoint
from .layers import Attend, ModelConfig, by_inputs


class _Linear(NamedTuple):
    """Weight [out, in] and bias, of a norm too."""

    weight: Tensor
    bias: Tensor


class _GPT2Layer(NamedTuple):
    attention_norm: _Linear
    qkv: _Linear
    out: _Linear
    mlp_norm: _Linear
    up: _Linear
    down: _Linear


class GPT2:
    """The model in `checkpoint`, whose weights it takes. Raises ValueError for what it does not support."""

    def __init__(self, checkpoint: Checkpoint, max_model_len: int | None) -> None:
        checkpoint.require("model_type", "gpt2")
        checkpoint.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
        checkpoint.require("scale_attn_weights", True)
        checkpoint.require("scale_attn_by_inverse_layer_idx", False)
        checkpoint.require("reorder_and_upcast_attn", False)
        checkpoint.require("add_cross_attention", False)
        self._hidden = int(checkpoint.setting("n_embd"))
        heads = int(checkpoint.setting("n_head"))
        if self._hidden % heads:
            raise ValueError(f"n_embd of {checkpoint.name} is {self._hidden} and cannot be split over {heads} heads")
        self.config = ModelConfig(
            architecture=checkpoint.config["architectures"][0],
            num_layers=int(checkpoint.setting("n_layer")),
            num_heads=heads,
            num_kv_heads=heads,
            head_size=self._hidden // heads,
            vocab_size=int(checkpoint.setting("vocab_size")),
            max_model_len=checkpoint.max_model_len("n_positions", max_model_len),
            eos_token_ids=checkpoint.eos_token_ids(),
        )
        self._epsilon = float(checkpoint.setting("layer_norm_epsilon"))
        # The oldest checkpoints were saved without the outer model's name.
        self._prefix = "transformer." if checkpoint.has("transformer.wte.weight") else ""
        vocabulary = (self.config.vocab_size, self._hidden)
        self._embedding = checkpoint.take(f"{self._prefix}wte.weight", *vocabulary)
        positions = int(checkpoint.setting("n_positions"))
        self._positions = checkpoint.take(f"{self._prefix}wpe.weight", positions, self._hidden)
        self._layers = [self._take_layer(checkpoint, index) for index in range(self.config.num_layers)]
        self._norm = self._take_norm(checkpoint, "ln_f")
        self._head = checkpoint.take_head(self._embedding, tied=True)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """See Model."""
        shape, epsilon = (self._hidden,), self._epsilon
        heads = (-1, 3, self.config.num_heads, self.config.head_size)
        hidden = embedding(token_ids, self._embedding) + embedding(positions, self._positions)
        for index, layer in enumerate(self._layers):
            normed = layer_norm(hidden, shape, *layer.attention_norm, epsilon)
            query, key, value = linear(normed, *layer.qkv).view(heads).unbind(1)
            hidden = hidden + linear(attend(index, query, key, value), *layer.out)
            normed = layer_norm(hidden, shape, *layer.mlp_norm, epsilon)
            hidden = hidden + linear(gelu(linear(normed, *layer.up), approximate="tanh"), *layer.down)
        return layer_norm(hidden, shape, *self._norm, epsilon)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return linear(hidden, self._head)

    def weights(self) -> Iterator[Tensor]:
        """See Model."""
        yield self._embedding
        yield self._positions
        yield from self._norm
        if self._head is not self._embedding:
            yield self._head
        for layer in self._layers:
            for pair in layer:
                yield from pair

    def _take_layer(self, checkpoint: Checkpoint, index: int) -> _GPT2Layer:
        hidden = self._hidden
        inner = int(checkpoint.setting("n_inner", 4 * hidden))
        return _GPT2Layer(
            attention_norm=self._take_norm(checkpoint, f"h.{index}.ln_1"),
            qkv=self._take_linear(checkpoint, f"h.{index}.attn.c_attn", hidden, 3 * hidden),
            out=self._take_linear(checkpoint, f"h.{index}.attn.c_proj", hidden, hidden),
            mlp_norm=self._take_norm(checkpoint, f"h.{index}.ln_2"),
            up=self._take_linear(checkpoint, f"h.{index}.mlp.c_fc", hidden, inner),
            down=self._take_linear(checkpoint, f"h.{index}.mlp.c_proj", inner, hidden),
        )

    def _take_linear(self, checkpoint: Checkpoint, name: str, inputs: int, outputs: int) -> _Linear:
        """GPT-2 keeps these weights as [in, out]."""
        weight = checkpoint.take(f"{self._prefix}{name}.weight", inputs, outputs)
        return _Linear(by_inputs(weight.t()), checkpoint.take(f"{self._prefix}{name}.bias", outputs))

    def _take_norm(self, checkpoint: Checkpoint, name: str) -> _Linear:
        return _Linear(
            checkpoint.take(f"{self._prefix}{name}.weight", self._hidden),
            checkpoint.take(f"{self._prefix}{name}.bias", self._hidden),
        )
