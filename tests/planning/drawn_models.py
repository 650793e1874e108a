"""Configurations of models drawn at random, by family: small, but with every size that decides what a layer keeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

Config = dict[str, Any]


def _base(rng: random.Random, architecture: str, model_type: str, **more: object) -> Config:
    heads = rng.choice((4, 8, 16))
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": 320,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_hidden_layers": rng.randint(2, 9),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4, 8, 16) if n <= heads]),
        "head_dim": rng.choice((32, 64, 128)),
        "max_position_embeddings": rng.choice((1024, 4096, 10_000)),
        **more,
    }


def _opt(rng: random.Random) -> Config:
    """Multi-head attention."""
    config = _base(rng, "OPTForCausalLM", "opt", ffn_dim=64, word_embed_proj_dim=256, do_layer_norm_before=True)
    del config["head_dim"], config["num_key_value_heads"]
    config["num_attention_heads"] = rng.choice((4, 8))
    return config


def _gpt2(rng: random.Random) -> Config:
    length = rng.choice((512, 1024))
    sizes = {"n_embd": 192, "n_layer": rng.randint(2, 6), "n_head": rng.choice((3, 6)), "n_positions": length}
    base = _base(rng, "GPT2LMHeadModel", "gpt2")
    return {name: base[name] for name in ("architectures", "model_type", "vocab_size", "torch_dtype")} | sizes


def _llama(rng: random.Random) -> Config:
    return _base(rng, "LlamaForCausalLM", "llama")


def _deepseek(rng: random.Random) -> Config:
    """Multi-head latent attention."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    routing = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False, "moe_layer_freq": 1}
    sizes = {
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    more = {**experts, **routing, **sizes, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}
    config = _base(rng, "DeepseekV2ForCausalLM", "deepseek_v2", moe_intermediate_size=64, **more)
    config["num_key_value_heads"] = config["num_attention_heads"]
    del config["head_dim"]
    return config


def _mistral(rng: random.Random) -> Config:
    """A sliding window in every layer."""
    return _base(rng, "MistralForCausalLM", "mistral", sliding_window=rng.choice((128, 500, 1024)))


def _gemma2(rng: random.Random) -> Config:
    """A sliding window in every other layer."""
    window = rng.choice((128, 500, 1024))
    return _base(rng, "Gemma2ForCausalLM", "gemma2", sliding_window=window, query_pre_attn_scalar=64)


def _gemma3(rng: random.Random) -> Config:
    """Full attention in every sixth layer."""
    config = _base(rng, "Gemma3ForCausalLM", "gemma3_text", sliding_window=512, query_pre_attn_scalar=64)
    config["num_hidden_layers"] = rng.randint(6, 20)
    return config


def _gpt_oss(rng: random.Random) -> Config:
    config = _base(rng, "GptOssForCausalLM", "gpt_oss", sliding_window=128, num_local_experts=4, num_experts_per_tok=2)
    config["intermediate_size"] = 128
    return config


def _lfm2(rng: random.Random) -> Config:
    """Short convolutions and attention."""
    convolution = {"conv_bias": False, "conv_L_cache": rng.choice((3, 4)), "conv_dim": 256, "block_dim": 256}
    forward = {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False, "block_multiple_of": 64}
    more = {**convolution, **forward, "block_ffn_dim_multiplier": 1.0, "norm_eps": 1e-5}
    config = _base(rng, "Lfm2ForCausalLM", "lfm2", **more)
    del config["head_dim"]
    kinds = [rng.choice(("conv", "full_attention")) for _ in range(config["num_hidden_layers"] - 2)]
    config["layer_types"] = ["conv", "full_attention", *kinds]
    return config


def _qwen3_next(rng: random.Random) -> Config:
    """Gated delta nets and attention."""
    states = {"linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_num_key_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    more: Config = {**states, **experts, "linear_conv_kernel_dim": 4, "linear_num_value_heads": rng.choice((4, 8))}
    more |= {"shared_expert_intermediate_size": 64, "mlp_only_layers": [], "norm_topk_prob": True}
    config = _base(rng, "Qwen3NextForCausalLM", "qwen3_next", full_attention_interval=4, **more)
    config["num_hidden_layers"] = rng.choice((4, 8, 12))
    return config


def _jamba(rng: random.Random) -> Config:
    """Mamba layers and attention."""
    states = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 16}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    config = _base(rng, "JambaForCausalLM", "jamba", attn_layer_period=4, attn_layer_offset=2, **states, **experts)
    del config["head_dim"]
    config["num_hidden_layers"] = rng.choice((4, 8))
    return config


def _nemotron_h(rng: random.Random) -> Config:
    """Mamba-2 layers, attention, and layers that keep nothing."""
    pattern = "M-M*M-" + "".join(rng.choice("M*-") for _ in range(rng.randint(0, 4)))
    states = {"mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": rng.choice((1, 2)), "ssm_state_size": 64}
    plain = {f"{part}_bias": False for part in ("use", "mamba_proj", "attention", "mlp")} | {"use_conv_bias": True}
    more = {
        **states,
        **plain,
        "conv_kernel": 4,
        "chunk_size": 64,
        "mamba_ssm_cache_dtype": rng.choice(("float32", "float16")),
        "mlp_hidden_act": "relu2",
        "expand": 1,
    }
    config = _base(rng, "NemotronHForCausalLM", "nemotron_h", layer_norm_epsilon=1e-5, **more)
    return config | {"num_hidden_layers": len(pattern), "hybrid_override_pattern": pattern}


def _llama4(rng: random.Random) -> Config:
    """Attention in chunks, and full attention in every fourth layer."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": []}
    chunks = {"attention_chunk_size": rng.choice((128, 512, 1024)), "no_rope_layer_interval": 4}
    more = {**experts, **chunks, "intermediate_size_mlp": 96, "use_qk_norm": False, "hidden_act": "silu"}
    config = _base(rng, "Llama4ForCausalLM", "llama4_text", **more)
    layers = config["num_hidden_layers"] = rng.choice((4, 8, 12))
    config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(layers)]
    config["layer_types"] = ["chunked_attention" if rotary else "full_attention" for rotary in config["no_rope_layers"]]
    return config


FAMILIES: Final[dict[str, Callable[[random.Random], Config]]] = {
    "opt": _opt,
    "gpt2": _gpt2,
    "llama": _llama,
    "deepseek_v2": _deepseek,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
    "llama4": _llama4,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
}


def drawn(seed: int) -> list[dict[str, Any]]:
    """One case of each family: its configuration, vLLM's arguments, and the bytes for KV."""
    rng = random.Random(seed)
    cases = []
    for family, draw in FAMILIES.items():
        config = draw(rng)
        arguments = {
            "block_size": 16 if family == "deepseek_v2" else rng.choice((32, 64, 128)),  # as vLLM's CPU kernels need
            "max_num_batched_tokens": rng.choice((512, 2048, 8192)),
            "enable_prefix_caching": rng.random() < 0.5,
            "enforce_eager": True,
        }
        cases.append({"config": config, "arguments": arguments, "available_bytes": rng.randrange(1 << 30, 8 << 30)})
    return cases
