"""A model's configuration (`config.json`) read for the caches of its layers, and their sizes in bytes.

Sources: vLLM's KV-cache specifications (vllm/v1/kv_cache_interface.py and
vllm/model_executor/layers/mamba/mamba_utils.py in 0.18, 0.32 and 0.33), with which tests/planning compares every size.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..base.errors import BadQuestion

MAMBA1_CHUNK: Final = 2048
"""Tokens: vLLM's choice for layers whose configuration has no chunk size."""


class CacheKind(enum.StrEnum):
    """How what a layer keeps grows with a request."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    STATE = "state"


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """The cache of one layer on one tensor-parallel rank.

    bytes_per_token: of keys and values, 0 for a state. reach: tokens of the window or the chunk, 0 for the others.
    state_bytes: of one state. checkpoints: whether vLLM from 0.32 on keeps one more state for each request.
    every_block: whether vLLM up to 0.28 keeps a state for every block when prefixes are cached. chunk: tokens that its
    kernel computes at once then.
    """

    kind: CacheKind
    bytes_per_token: int = 0
    reach: int = 0
    state_bytes: int = 0
    checkpoints: bool = False
    every_block: bool = False
    chunk: int = 0


def attention(kv_heads: int, head_dim: int, item_bytes: int, tensor_parallel: int = 1, reach: int = 0) -> LayerCache:
    """Return the cache of multi-head or grouped-query attention: keys and values of the heads on one rank.

    reach: the sliding window in tokens, 0 without one. A rank holds at least one head.
    """
    heads = max(1, kv_heads // tensor_parallel)
    kind = CacheKind.WINDOW if reach else CacheKind.FULL
    return LayerCache(kind=kind, bytes_per_token=2 * heads * head_dim * item_bytes, reach=reach)


def latent_attention(rank: int, rope_dim: int, item_bytes: int) -> LayerCache:
    """Return the cache of multi-head latent attention: one vector a token, whole on every rank."""
    return LayerCache(kind=CacheKind.FULL, bytes_per_token=(rank + rope_dim) * item_bytes)


def mamba1(inner: int, state: int, kernel: int, item_bytes: int, tensor_parallel: int = 1) -> LayerCache:
    """Return the state of a Mamba layer: the convolution's last inputs, and the recurrent state."""
    width = inner // tensor_parallel
    total = width * (kernel - 1 + state) * item_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total, every_block=True, chunk=MAMBA1_CHUNK)


def mamba2(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
    item_bytes: int,
    recurrent_bytes: int,
    chunk: int,
    tensor_parallel: int = 1,
) -> LayerCache:
    """Return the state of a Mamba-2 layer. Groups that do not divide by the ranks are copied to each rank.

    recurrent_bytes: of an item of the recurrent state, which some families keep in 32 bits.
    """
    copied = groups if groups % tensor_parallel == 0 else tensor_parallel
    width = (heads * head_dim + 2 * copied * state) // tensor_parallel
    recurrent = heads // tensor_parallel * head_dim * state
    total = width * (kernel - 1) * item_bytes + recurrent * recurrent_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total, checkpoints=True, every_block=True, chunk=chunk)


def gated_delta_net(
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    kernel: int,
    item_bytes: int,
    recurrent_bytes: int,
    tensor_parallel: int = 1,
) -> LayerCache:
    """Return the state of a gated delta net layer, as Qwen3-Next has it."""
    width = (2 * key_heads * key_dim + value_heads * value_dim) // tensor_parallel
    recurrent = value_heads // tensor_parallel * value_dim * key_dim
    total = width * (kernel - 1) * item_bytes + recurrent * recurrent_bytes
    return LayerCache(kind=CacheKind.STATE, state_bytes=total)


def short_convolution(width: int, kernel: int, item_bytes: int, tensor_parallel: int = 1) -> LayerCache:
    """Return the state of a short convolution, as LFM2 has it: its last inputs."""
    return LayerCache(kind=CacheKind.STATE, state_bytes=width // tensor_parallel * (kernel - 1) * item_bytes)


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
        return mamba1(
            inner or field("mamba_expand", "expand") * field("hidden_size"),
            field("mamba_d_state", "state_size"),
            field("mamba_d_conv", "conv_kernel"),
            item_bytes,
            tensor_parallel,
        )
    if kind == "mamba":
        return mamba2(
            heads=field("mamba_n_heads", "mamba_num_heads", "num_heads"),
            head_dim=field("mamba_d_head", "mamba_head_dim", "head_dim"),
            groups=field("mamba_n_groups", "n_groups"),
            state=field("mamba_d_state", "ssm_state_size", "state_size"),
            kernel=field("mamba_d_conv", "conv_kernel"),
            item_bytes=item_bytes,
            recurrent_bytes=recurrent_item_bytes(text, item_bytes),
            chunk=text.get("mamba_chunk_size") or text.get("chunk_size") or MAMBA1_CHUNK,
            tensor_parallel=tensor_parallel,
        )
    if kind == "linear_attention":
        return gated_delta_net(
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
        return short_convolution(field("hidden_size"), field("conv_L_cache"), item_bytes, tensor_parallel)
    raise BadQuestion(f"the plan does not know layers of the kind {kind!r}")


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
        is_hybrid=any(layer.kind == CacheKind.STATE for layer in layers),
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
            return [msgspec.structs.replace(full, kind=CacheKind.WINDOW, reach=reach)]
        case "chunked_attention":
            chunk = _positive_field(text, ("attention_chunk_size",), "the attention chunk")
            return [msgspec.structs.replace(full, kind=CacheKind.CHUNK, reach=chunk)]
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
        return latent_attention(rank, rope, kv_item), reach
    if text.get("num_attention_heads") == 0:  # no layer has attention
        return attention(1, 1, kv_item), 0
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
    return attention(kv_heads, head_dim, kv_item, tensor_parallel), reach


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
