"""The model that the engine brings itself: a small Llama with random weights, so that nothing is ever downloaded.

It has learned nothing, but it computes as any other does, and the same text from the same seed. Only the rows of
printable ASCII in its last layer are not zero, so that its output is readable, and ends at its length.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .tokens import ByteTokenizer

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": ByteTokenizer.VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "eos_token_id": ByteTokenizer.END,
}
_PRINTABLE: Final = slice(0x20, 0x7F)
_LOGIT_SPREAD: Final = 4.0
"""The standard deviation of a printable token's logit: at temperature 1 one token seldom has all the mass."""


def checkpoint(seed: int, dtype: torch.dtype, device: str) -> Checkpoint:
    """Return the tiny model's settings and weights."""
    return Checkpoint("tiny", CONFIG, weights(seed), dtype, device)


def weights(seed: int) -> dict[str, Tensor]:
    """In fp32, under the names that a Llama checkpoint has for them."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
    query = CONFIG["num_attention_heads"] * CONFIG["head_dim"]
    key = CONFIG["num_key_value_heads"] * CONFIG["head_dim"]

    def random(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        """Return a weight that keeps the size of its input, times `gain`."""
        return torch.randn(outputs, inputs, generator=generator) * (gain / math.sqrt(inputs))

    head = torch.zeros(vocab, hidden)
    head[_PRINTABLE] = random(_PRINTABLE.stop - _PRINTABLE.start, hidden, _LOGIT_SPREAD)
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (key, hidden),
        "self_attn.v_proj": (key, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            tensors[f"{prefix}.{name}.weight"] = random(*shape)
    return tensors
