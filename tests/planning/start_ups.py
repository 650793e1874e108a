"""Start-ups that public reports, recordings and issue texts print, and what the plan computes for the same model.

    python -m tests.planning.start_ups      the table of docs/plan.md

A row is checked where the text states the model and one free number: the memory for KV, or the blocks. The numbers of a
model are those of its published config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kvscope.monitor.planning.capacity_plan import plan_capacity
from kvscope.monitor.planning.kv_pool import EngineSettings, pool_of
from kvscope.monitor.planning.model_shape import shape_of
from kvscope.monitor.planning.plan_types import GIB_BYTES, CapacityPlan, ExpectedLoad, MemoryBudget

LLAMA_3_8B: Final = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
QWEN_3_235B: Final = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 4096,
    "max_position_embeddings": 40960,
}
MISTRAL_4: Final = {
    "model_type": "mistral4",
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "hidden_size": 4096,
    "max_position_embeddings": 1048576,
}


def _qwen_3_5(layers: int, heads: int, hidden: int, value_heads: int) -> dict[str, Any]:
    """Three gated delta nets to one layer of attention; the recurrent state is kept in 32 bits."""
    return {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_size": hidden,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
    }


def _tiny(model_type: str, **more: object) -> dict[str, Any]:
    """The recordings' models: the sizes of their groups are in the recorded description of the engine."""
    return {
        "model_type": model_type,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_size": 64,
        "max_position_embeddings": 4096,
        **more,
    }


TINY_GEMMA: Final = _tiny("gemma3_text", num_hidden_layers=6, head_dim=16, sliding_window=128, sliding_window_pattern=3)
TINY_LFM2: Final = _tiny(
    "lfm2",
    num_hidden_layers=4,
    head_dim=16,
    conv_L_cache=3,
    layer_types=["conv", "full_attention", "conv", "full_attention"],
)


class StartUp(NamedTuple):
    """A start-up: where it is printed, the model, what the text states, and what it prints."""

    source: str
    family: str
    model: str
    config: Mapping[str, Any]
    stated: Mapping[str, float]
    """gib or bytes for KV, or blocks."""
    printed: Mapping[str, float]
    """tokens, concurrency, blocks, longest, needed_gib, block_size."""
    release: tuple[int, int]
    length: int = 0
    ranks: int = 1
    block_size: int = 16
    prefix_caching: bool = False

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings(release=self.release, block_size=self.block_size, prefix_caching=self.prefix_caching)


def _recorded(name: str, blocks: int, tokens: int, length: int, concurrency: float, **more: Any) -> StartUp:
    given: dict[str, Any] = {"family": "grouped-query attention", "model": "2 layers", "config": _tiny("llama")} | more
    printed = {"tokens": tokens, "concurrency": concurrency}
    given |= {"stated": {"blocks": blocks}, "printed": printed, "release": (0, 32), "length": length}
    return StartUp(name, block_size=given.pop("block_size", 32), **given)


START_UPS: Final = (
    StartUp(
        "vLLM 12330",
        "grouped-query attention",
        "Llama 3 8B",
        LLAMA_3_8B,
        {"gib": 11.12},
        {"blocks": 5691, "concurrency": 11.12},
        (0, 6),
        8192,
    ),
    StartUp(
        "vLLM 21348, SGLang",
        "grouped-query attention",
        "Qwen3-235B-A22B, 4 ranks",
        QWEN_3_235B,
        {"gib": 8.23 + 8.23},
        {"tokens": 367404},
        (0, 9),
        ranks=4,
        block_size=1,
    ),
    StartUp(
        "KAITO 2132",
        "latent attention",
        "Mistral-Small-4-119B, 2 ranks",
        MISTRAL_4,
        {"gib": 17.39},
        {"longest": 810208, "needed_gib": 22.5},
        (0, 19),
        1048576,
        ranks=2,
    ),
    StartUp(
        "vLLM 0.18, usage falls from 100 % to 0 %",
        "gated delta nets and attention",
        "Qwen3.5-9B",
        _qwen_3_5(32, 16, 4096, 32),
        {"gib": 45.94},
        {"concurrency": 5.70},
        (0, 18),
        262144,
    ),
    StartUp(
        "vLLM 40691",
        "gated delta nets and attention",
        "Qwen3.5-27B",
        _qwen_3_5(64, 24, 5120, 48),
        {"blocks": 1487},
        {"tokens": 290864, "concurrency": 33.04},
        (0, 19),
        32768,
    ),
    StartUp(
        "vLLM 45238",
        "gated delta nets and attention",
        "Qwen3.5-4B",
        _qwen_3_5(32, 16, 2560, 32),
        {"gib": 10},
        {"block_size": 528},
        (0, 26),
        262144,
        prefix_caching=True,
    ),
    _recorded("startup", 512, 16384, 4096, 4.00),
    _recorded("startup, blocks of 16", 512, 8192, 4096, 2.00, block_size=16),
    _recorded("healthy-shared-prefix", 513, 16416, 8192, 2.00, prefix_caching=True),
    _recorded("never-freed", 513, 16416, 4096, 4.01, prefix_caching=True),
    _recorded("decode-growth-preempts", 4670, 149440, 16384, 9.12),
    _recorded("lockstep-collapse", 5031, 160992, 16384, 9.83),
    _recorded("frozen-engine", 257, 8224, 4096, 2.01),
    _recorded("kv-events", 128, 4096, 2048, 2.00, prefix_caching=True),
    _recorded("probe-leak-uni-full", 900, 28800, 4096, 7.03, prefix_caching=True),
    _recorded("probe-leaky-all-server", 600, 19200, 4096, 4.69, prefix_caching=True),
    _recorded("probe-bug-lost, probe-pause", 160, 5120, 4096, 1.25, prefix_caching=True),
    _recorded(
        "probe-healthy-gemma-3-groups",
        900,
        13858,
        4096,
        3.38,
        family="sliding window and attention",
        model="6 layers, window of 128",
        config=TINY_GEMMA,
        prefix_caching=True,
    ),
    _recorded(
        "probe-healthy-hybrid-lfm2",
        200,
        6301,
        4096,
        1.54,
        family="short convolutions and attention",
        model="4 layers",
        config=TINY_LFM2,
        prefix_caching=True,
    ),
)

NOT_ENOUGH: Final = {
    "vLLM 21348, vLLM": "which of the 4 workers each line is from: 178,880 tokens take 8.02 GiB, one worker had 8.11",
    "vLLM 11251": "the model; its 3,852 blocks and 1.54 requests of 40,000 tokens agree",
    "vLLM 16580": "the memory for KV and the release (Gemma 3 12B); 25,072 tokens and 0.21 requests of 120,000 agree",
    "vLLM 39734": "the memory for KV; the plan does not compute Gemma 4 either",
    "vLLM 2418": "the model's sizes and the memory for KV (alpaca-2); 229 blocks and 3,664 tokens agree",
    "arc-cookbook 4": "the model; 4.26 GiB for 100,000 tokens are 45,741 bytes a token",
    "vLLM 10439": "every size: the error prints none",
}
"""Reports that print a size, and what is missing to compute it."""


def computed(row: StartUp) -> dict[str, float]:
    """Return what the plan computes under the names of `printed`."""
    shape = shape_of(row.config, tensor_parallel=row.ranks)
    pool = pool_of(shape, row.settings)
    stated = row.stated
    kv = int(stated["gib"] * GIB_BYTES) if "gib" in stated else int(stated["blocks"]) * pool.bytes_per_block
    plan: CapacityPlan = plan_capacity(shape, row.settings, MemoryBudget(kv=kv), ExpectedLoad(max_model_len=row.length))
    needed = pool.blocks_of(plan.max_model_len) * pool.bytes_per_block / GIB_BYTES
    return {
        "tokens": plan.pool_tokens,
        "concurrency": plan.max_concurrency,
        "blocks": plan.blocks,
        "longest": plan.longest_request,
        "needed_gib": needed,
        "block_size": plan.block_size,
    }


UNITS: Final = {
    "tokens": "{:,.0f} tokens",
    "concurrency": "{:.2f} requests",
    "blocks": "{:,.0f} blocks",
    "longest": "{:,.0f} at most",
    "needed_gib": "{:.2f} GiB needed",
    "block_size": "blocks of {:,.0f}",
}


def table() -> list[str]:
    """Return the rows of docs/plan.md."""
    lines = []
    for row in START_UPS:
        plan = computed(row)
        printed = ", ".join(UNITS[name].format(value) for name, value in row.printed.items())
        ours = ", ".join(UNITS[name].format(plan[name]) for name in row.printed)
        off = max(abs(plan[name] - value) / value for name, value in row.printed.items())
        lines.append(f"| {row.source} | {row.model} ({row.family}) | {printed} | {ours} | {100 * off:.2f} % |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
    print("\n".join(f"| {source} | {missing} |" for source, missing in NOT_ENOUGH.items()))
