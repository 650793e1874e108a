"""Shapes of models without weights (`--load-format dummy`), as their config.json has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvscope.lab.on_vllm.scheduler_maker import TINY_LLAMA

WINDOWED = TINY_LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}
TWO_WINDOWS = TINY_LLAMA | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "query_pre_attn_scalar": 64,
    "sliding_window": 96,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
HYBRID = TINY_LLAMA | {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "block_dim": 64,
    "conv_dim": 64,
    "head_dim": 32,
}
SLOWER = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
"""Overrides for a model whose prompts take so long that a wave of them stands in the queue."""


def save_shape(directory: Path, config: dict[str, Any]) -> None:
    """Give the model in that directory another shape."""
    (directory / "config.json").write_text(json.dumps(config))
