"""A model's configuration (`config.json`) read for the caches of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from kvscope.monitor.errors import BadQuestion
from kvscope.monitor.planning import layer_caches
from kvscope.monitor.planning.hybrid_layers import hybrid_kinds, state_of
from kvscope.monitor.planning.layer_caches import LayerCache

NESTED: Final = ("text_config", "llm_config", "language_config")
"""Where a multi-modal model has its language model's configuration."""
LAYER_FIELDS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEAD_FIELDS: Final = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_FIELDS: Final = (
    "n_head_kv",
    "num_kv_heads",
    "num_key_value_heads",
    "multi_query_group_num",
    "num_attention_groups",
)
HIDDEN_SIZE_FIELDS: Final = ("hidden_size", "n_embd", "d_model")
LENGTH_FIELDS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
DTYPE_BYTES: Final = {"float32": 2, "float16": 2, "bfloat16": 2, "half": 2, "float": 2}
"""By the model's dtype. vLLM serves a float32 model in 16 bits unless `--dtype` sets another."""
KV_DTYPE_BYTES: Final = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
WITHOUT_LATENT: Final = frozenset({"minicpm3"})
"""Families with a latent rank whose attention vLLM runs on whole keys and values."""
OWN_CACHES: Final = {
    "deepseek_v32": "its sparse attention keeps an index beside the latent cache",
    "deepseek_v4": "its compressed caches have sizes of their own",
    "glm_moe_dsa": "its sparse attention keeps an index beside the latent cache",
    "gemma3n": "some of its layers share the cache of others",
    "gemma4": "its layers have heads of different sizes",
    "nemotron-nas": "its layers have different numbers of heads",
    "whisper": "it keeps the encoder's output too",
}
"""Families whose caches this module does not compute, and why."""
PLAIN: Final = frozenset(
    {
        "falcon",
        "gemma",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gptj",
        "granite",
        "granitemoe",
        "internlm2",
        "llama",
        "mixtral",
    }
    | {"mpt", "olmo", "olmo2", "opt", "phi", "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2"}
)
"""Families all of whose layers have full attention, with no field to the contrary."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """The cache needs of a model for a request. max_model_len: 0 where the configuration does not give it."""

    family: str
    layers: tuple[LayerCache, ...]
    max_model_len: int
    is_hybrid: bool = False
    is_latent: bool = False
    assumed: tuple[str, ...] = ()
    """Assumptions about fields that the configuration lacks."""


class UnknownShape(BadQuestion):
    """The configuration does not determine what the model keeps. The message names the field, or the family."""


def shape_of(config: Mapping[str, Any], kv_dtype: str = "auto", tensor_parallel: int = 1) -> ModelShape:
    """Return the layers' caches on one of `tensor_parallel` ranks.

    kv_dtype: as of vLLM's `--kv-cache-dtype`. Raises UnknownShape.
    """
    text = _language_model(config)
    family = str(text.get("model_type", "") or "a model without model_type")
    if family in OWN_CACHES:
        raise UnknownShape(
            f"the plan does not know {family}: {OWN_CACHES[family]}; the engine prints its size at start-up"
        )
    count, item = _positive_field(text, LAYER_FIELDS, "layers"), _item_bytes(text)
    kv_item = item if kv_dtype == "auto" else KV_DTYPE_BYTES.get(kv_dtype, 0)
    if not kv_item:
        raise UnknownShape(f"--kv-cache-dtype {kv_dtype} is not one of auto, {', '.join(KV_DTYPE_BYTES)}")
    latent = bool(text.get("kv_lora_rank")) and family not in WITHOUT_LATENT
    full, reach = _attention_cache(text, latent, kv_item, tensor_parallel)
    kinds = hybrid_kinds(text, count)
    layers: list[LayerCache] = []
    for kind in kinds or ("full_attention",) * count:
        layers += _caches_of(kind, full, reach, text, item, tensor_parallel)
    known = kinds is not None or latent or family in PLAIN
    return ModelShape(
        family=family,
        layers=tuple(layers),
        max_model_len=_positive_field(text, LENGTH_FIELDS, "", default=0),
        is_hybrid=any(layer.kind == layer_caches.CacheKind.STATE for layer in layers),
        is_latent=latent,
        assumed=() if known else (f"every layer of {family} keeps full attention: its configuration names no other",),
    )


def shape_of_numbers(
    layers: int, kv_heads: int, head_dim: int, kv_dtype: str = "auto", tensor_parallel: int = 1
) -> ModelShape:
    """Return the shape of a model with full attention in every layer. Raises UnknownShape."""
    fields = {"num_hidden_layers": layers, "num_attention_heads": kv_heads, "head_dim": head_dim, "model_type": "llama"}
    return msgspec.structs.replace(shape_of(fields, kv_dtype, tensor_parallel), family="the model of these numbers")


def _caches_of(
    kind: str, full: LayerCache, reach: int, text: Mapping[str, Any], item: int, tensor_parallel: int
) -> list[LayerCache]:
    match kind:
        case "none":
            return []
        case "full_attention":
            return [full]
        case "sliding_attention":
            return [msgspec.structs.replace(full, kind=layer_caches.CacheKind.WINDOW, reach=reach)]
        case "chunked_attention":
            chunk = _positive_field(text, ("attention_chunk_size",), "the attention chunk")
            return [msgspec.structs.replace(full, kind=layer_caches.CacheKind.CHUNK, reach=chunk)]
        case "attention_and_state":
            return [full, state_of(text, item, tensor_parallel)]
        case _:
            return [state_of(text, item, tensor_parallel, kind)]


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in NESTED:
        if isinstance(nested := config.get(name), Mapping):
            return {"torch_dtype": config.get("torch_dtype")} | dict(nested)
    return config


def _attention_cache(
    text: Mapping[str, Any], latent: bool, kv_item: int, tensor_parallel: int
) -> tuple[LayerCache, int]:
    """Return the cache of a layer with full attention, and the sliding window of those that have one."""
    window = text.get("sliding_window")
    reach = window if isinstance(window, int) and window > 0 else 0
    if latent:
        rank, rope = (
            _positive_field(text, ("kv_lora_rank",), "the rank"),
            _positive_field(text, ("qk_rope_head_dim",), "the rotary part"),
        )
        return layer_caches.latent_attention(rank, rope, kv_item), reach
    if text.get("num_attention_heads") == 0:  # no layer has attention
        return layer_caches.attention(1, 1, kv_item), 0
    heads = _positive_field(text, HEAD_FIELDS, "attention heads")
    nested = text.get("attn_config")
    of_attention = nested.get("kv_n_heads") if isinstance(nested, Mapping) else None
    fields = text if of_attention is None else {**text, "num_kv_heads": of_attention}
    kv_heads = _positive_field(fields, KV_HEAD_FIELDS, "", default=heads)
    if text.get("model_type") == "falcon" and not text.get("new_decoder_architecture"):
        kv_heads = 1 if text.get("multi_query") else heads
    head_dim = _positive_field(text, ("head_dim", "hidden_size_per_head", "attention_head_dim"), "", default=0)
    if not head_dim:
        head_dim = _positive_field(text, HIDDEN_SIZE_FIELDS, "the hidden size") // heads
    if not head_dim:
        raise UnknownShape(
            "the hidden size is smaller than the number of attention heads: give head_dim in config.json"
        )
    return layer_caches.attention(kv_heads, head_dim, kv_item, tensor_parallel), reach


def _item_bytes(text: Mapping[str, Any]) -> int:
    name = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnknownShape(f"config.json has the dtype {name!r}; the plan knows {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[name]


def _positive_field(text: Mapping[str, Any], names: Iterable[str], what: str, default: int | None = None) -> int:
    """Return the first of these fields that is there. Raises UnknownShape if it is no positive integer, or there is
    none.
    """
    for name in names:
        value = text.get(name)
        if value is None or (default is not None and value == 0):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnknownShape(f"config.json has {name} = {value!r}; it must be an integer of at least 1")
        return value
    if default is None:
        raise UnknownShape(f"config.json does not have {what}: it lacks all of {', '.join(names)}")
    return default
