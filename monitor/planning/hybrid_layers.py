"""Which kind of cache each layer has in models whose layers differ, by family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvscope.monitor.errors import BadQuestion
from kvscope.monitor.planning import layer_caches
from kvscope.monitor.planning.layer_caches import LayerCache

Text = Mapping[str, Any]
RECURRENT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
SYNONYMS: Final = {"attention": "full_attention", "conv": "conv", "hybrid": "attention_and_state"}


def _every_nth(period: int, at: int, one: str, others: str) -> Callable[[int], str]:
    return lambda layer: one if layer % period == at else others


def _alternating(text: Text, default: int) -> Callable[[int], str]:
    """Return a function of the layer: the last of each `sliding_window_pattern` layers has full attention."""
    period = text.get("sliding_window_pattern") or default
    return _every_nth(period, period - 1, "full_attention", "sliding_attention")


def _llama4_chunks(text: Text) -> Callable[[int], str]:
    rotary = text.get("no_rope_layers")
    period = text.get("no_rope_layer_interval") or 4
    if not text.get("attention_chunk_size"):
        return lambda _: "full_attention"
    if rotary:
        return lambda layer: "chunked_attention" if rotary[layer] else "full_attention"
    return _every_nth(period, period - 1, "full_attention", "chunked_attention")


def _all_windows(text: Text) -> Callable[[int], str]:
    return lambda _: "sliding_attention" if text.get("sliding_window") else "full_attention"


def _qwen_windows(text: Text) -> Callable[[int], str]:
    first = text.get("max_window_layers") or 0
    if not (text.get("use_sliding_window") and text.get("sliding_window")):
        return lambda _: "full_attention"
    return lambda layer: "sliding_attention" if layer >= first else "full_attention"


def _nemotron(text: Text) -> Callable[[int], str]:
    pattern = str(text.get("hybrid_override_pattern") or "")
    return lambda layer: {"M": "mamba", "*": "full_attention"}.get(pattern[layer : layer + 1], "none")


def _bamba(text: Text) -> Callable[[int], str]:
    with_attention = frozenset(text.get("attn_layer_indices") or ())
    return lambda layer: "full_attention" if layer in with_attention else "mamba"


def _lfm2(text: Text) -> Callable[[int], str]:
    with_attention = frozenset(text.get("full_attn_idxs") or ())
    return lambda layer: "full_attention" if layer in with_attention else "conv"


def _delta_nets(text: Text) -> Callable[[int], str]:
    period = text.get("full_attention_interval") or 4
    return _every_nth(period, period - 1, "full_attention", "linear_attention")


BY_FAMILY: Final[dict[str, Callable[[Text], Callable[[int], str]]]] = {
    "gemma2": lambda text: _alternating(text, 2),
    "gemma3_text": lambda text: _alternating(text, 6),
    "gemma3": lambda text: _alternating(text, 6),
    "cohere2": lambda text: _alternating(text, 4),
    "gpt_oss": lambda _: _every_nth(2, 1, "full_attention", "sliding_attention"),
    "llama4_text": _llama4_chunks,
    "llama4": _llama4_chunks,
    "mistral": _all_windows,
    "mixtral": _all_windows,
    "phi3": _all_windows,
    "qwen2": _qwen_windows,
    "qwen3": _qwen_windows,
    "jamba": lambda text: _every_nth(
        text.get("attn_layer_period") or 8, text.get("attn_layer_offset") or 4, "full_attention", "mamba1"
    ),
    "bamba": _bamba,
    "nemotron_h": _nemotron,
    "lfm2": _lfm2,
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _delta_nets),
    "falcon_h1": lambda _: lambda _: "attention_and_state",
    "mamba": lambda _: lambda _: "mamba1",
    "falcon_mamba": lambda _: lambda _: "mamba1",
    "mamba2": lambda _: lambda _: "mamba",
}


def hybrid_kinds(text: Text, count: int) -> list[str] | None:
    """Return each layer's kind, by the configuration's own list or by its family, or None if neither gives it.

    Kinds: full_attention, sliding_attention, chunked_attention, mamba1, mamba (Mamba-2), conv, linear_attention,
    attention_and_state, none. Raises BadQuestion for a list that is too short.
    """
    family = text.get("model_type", "")
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, Sequence) and not isinstance(listed, str) and family != "jamba":
        if len(listed) < count:
            raise BadQuestion(f"config.json names the kinds of {len(listed)} layers, and has {count}")
        return [SYNONYMS.get(str(kind), str(kind)) for kind in listed[:count]]
    chosen = BY_FAMILY.get(family)
    return None if chosen is None else [chosen(text)(layer) for layer in range(count)]


def recurrent_item_bytes(text: Text, item_bytes: int) -> int:
    """Return the bytes of an item of the recurrent state: by the configuration, or as vLLM chooses for the family.

    Nemotron-H without the field: 32 bits, as vLLM 0.32 has it (0.18: 16). Raises BadQuestion for an unknown dtype.
    """
    name = text.get("mamba_ssm_cache_dtype") or text.get("mamba_ssm_dtype")
    if name is None:
        return 4 if text.get("model_type") == "nemotron_h" else item_bytes
    if name not in RECURRENT_BYTES:
        raise BadQuestion(f"config.json keeps states in {name!r}; the plan knows {', '.join(RECURRENT_BYTES)}")
    return RECURRENT_BYTES[name]


def state_of(text: Text, item_bytes: int, tensor_parallel: int, kind: str = "mamba") -> LayerCache:
    """Return what a layer without attention keeps. Raises BadQuestion for a kind or a field that is not known."""

    def field(*names: str) -> int:
        for name in names:
            value = text.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        raise BadQuestion(
            f"config.json does not have the size of the layers' state: it lacks all of {', '.join(names)}"
        )

    if kind == "mamba1":
        inner = text.get("intermediate_size") if text.get("model_type") == "falcon_mamba" else None
        return layer_caches.mamba1(
            inner or field("mamba_expand", "expand") * field("hidden_size"),
            field("mamba_d_state", "state_size"),
            field("mamba_d_conv", "conv_kernel"),
            item_bytes,
            tensor_parallel,
        )
    if kind == "mamba":
        return layer_caches.mamba2(
            heads=field("mamba_n_heads", "mamba_num_heads", "num_heads"),
            head_dim=field("mamba_d_head", "mamba_head_dim", "head_dim"),
            groups=field("mamba_n_groups", "n_groups"),
            state=field("mamba_d_state", "ssm_state_size", "state_size"),
            kernel=field("mamba_d_conv", "conv_kernel"),
            item_bytes=item_bytes,
            recurrent_bytes=recurrent_item_bytes(text, item_bytes),
            chunk=text.get("mamba_chunk_size") or text.get("chunk_size") or layer_caches.MAMBA1_CHUNK,
            tensor_parallel=tensor_parallel,
        )
    if kind == "linear_attention":
        return layer_caches.gated_delta_net(
            key_heads=field("linear_num_key_heads"),
            value_heads=field("linear_num_value_heads"),
            key_dim=field("linear_key_head_dim"),
            value_dim=field("linear_value_head_dim"),
            kernel=field("linear_conv_kernel_dim"),
            item_bytes=item_bytes,
            recurrent_bytes=recurrent_item_bytes(text, item_bytes),
            tensor_parallel=tensor_parallel,
        )
    if kind == "conv":
        return layer_caches.short_convolution(field("hidden_size"), field("conv_L_cache"), item_bytes, tensor_parallel)
    raise BadQuestion(f"the plan does not know layers of the kind {kind!r}")
