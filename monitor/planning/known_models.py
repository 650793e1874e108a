"""Sizes of models that reports often name, as their published configurations state them.

Weights are the parameters times two bytes. A model that is not here is read from its `config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

MOST_NAME_CHARACTERS: Final = 200
TRAINED_FOR: Final = ("-instruct", "-chat", "-it", "-hf", "-base")
"""Suffixes of a name that change nothing in the cache."""


class KnownModel(NamedTuple):
    """A model's configuration and the size of its weights in bytes."""

    config: Mapping[str, Any]
    weights: int


def _plain(
    model_type: str, layers: int, heads: int, kv_heads: int, hidden: int, length: int, **more: int
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden,
        "max_position_embeddings": length,
        **more,
    }


def _with_weights(parameters_millions: float, config: Mapping[str, Any]) -> KnownModel:
    return KnownModel(config, round(parameters_millions * 2e6))


def _gpt2(layers: int, heads: int, width: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": 1024}


def _gemma3(layers: int, heads: int, kv_heads: int, hidden: int, head_dim: int = 256) -> dict[str, Any]:
    return _plain("gemma3_text", layers, heads, kv_heads, hidden, 131072, head_dim=head_dim, sliding_window=1024)


KNOWN_MODELS: Final[dict[str, KnownModel]] = {
    "gpt2": _with_weights(124.4, _gpt2(12, 12, 768)),
    "gpt2-medium": _with_weights(354.8, _gpt2(24, 16, 1024)),
    "gpt2-large": _with_weights(774.0, _gpt2(36, 20, 1280)),
    "gpt2-xl": _with_weights(1557.6, _gpt2(48, 25, 1600)),
    "llama-2-7b": _with_weights(6738, _plain("llama", 32, 32, 32, 4096, 4096)),
    "llama-2-13b": _with_weights(13016, _plain("llama", 40, 40, 40, 5120, 4096)),
    "meta-llama-3-8b": _with_weights(8030, _plain("llama", 32, 32, 8, 4096, 8192)),
    "meta-llama-3-70b": _with_weights(70554, _plain("llama", 80, 64, 8, 8192, 8192)),
    "llama-3.1-8b": _with_weights(8030, _plain("llama", 32, 32, 8, 4096, 131072)),
    "llama-3.1-70b": _with_weights(70554, _plain("llama", 80, 64, 8, 8192, 131072)),
    "llama-3.3-70b": _with_weights(70554, _plain("llama", 80, 64, 8, 8192, 131072)),
    "qwen2.5-0.5b": _with_weights(494, _plain("qwen2", 24, 14, 2, 896, 32768)),
    "qwen2.5-7b": _with_weights(7616, _plain("qwen2", 28, 28, 4, 3584, 32768)),
    "qwen2.5-32b": _with_weights(32764, _plain("qwen2", 64, 40, 8, 5120, 32768)),
    "qwen3-0.6b": _with_weights(596, _plain("qwen3", 28, 16, 8, 1024, 40960, head_dim=128)),
    "qwen3-4b": _with_weights(4022, _plain("qwen3", 36, 32, 8, 2560, 40960, head_dim=128)),
    "qwen3-8b": _with_weights(8191, _plain("qwen3", 36, 32, 8, 4096, 40960, head_dim=128)),
    "qwen3-32b": _with_weights(32762, _plain("qwen3", 64, 64, 8, 5120, 40960, head_dim=128)),
    "qwen3-30b-a3b": _with_weights(30532, _plain("qwen3_moe", 48, 32, 4, 2048, 40960, head_dim=128)),
    "qwen3-235b-a22b": _with_weights(235094, _plain("qwen3_moe", 94, 64, 4, 4096, 40960, head_dim=128)),
    "gemma-3-4b": _with_weights(4300, _gemma3(34, 8, 4, 2560)),
    "gemma-3-12b": _with_weights(12187, _gemma3(48, 16, 8, 3840)),
    "gemma-3-27b": _with_weights(27432, _gemma3(62, 32, 16, 5376, 128)),
}


def known_model(name: str) -> KnownModel | None:
    """Return the model of that name, with or without its organization and a suffix such as `-Instruct`."""
    key = name[:MOST_NAME_CHARACTERS].rstrip("/").rpartition("/")[2].lower()
    for suffix in TRAINED_FOR:
        key = key.removesuffix(suffix)
    return KNOWN_MODELS.get(key)
