"""`monitor plan`, against figures from public reports, sums done by hand, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope.monitor.planning.capacity_plan import plan_capacity
from kvscope.monitor.planning.kv_pool import EngineSettings, pool_of
from kvscope.monitor.planning.model_shape import shape_of
from kvscope.monitor.planning.plan_types import CapacityPlan, ExpectedLoad, MemoryBudget
from kvscope.monitor.terminal.cli import main

GIB = 1 << 30
LLAMA_3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
GEMMA_2 = {
    "model_type": "gemma2",
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "hidden_size": 7168,
    "max_position_embeddings": 163840,
}


def planned(config: dict[str, Any], **more: Any) -> CapacityPlan:
    given = {
        "budget": MemoryBudget(kv=8 * GIB),
        "demand": ExpectedLoad(),
        "settings": EngineSettings(release=(0, 18)),
    } | more
    return plan_capacity(shape_of(config), given["settings"], given["budget"], given["demand"])


def test_blocks_and_concurrency_are_what_a_public_start_up_printed() -> None:
    """https://github.com/vllm-project/vllm/issues/12330: Llama 3 8B, 5,691 blocks, 11.12 requests of 8,192 tokens."""
    found = planned(LLAMA_3_8B, budget=MemoryBudget(kv=5691 * 16 * 128 * 1024))
    assert (found.blocks, found.bytes_per_token) == (5691, 128 * 1024)
    assert round(found.max_concurrency, 2) == 11.12
    assert found.pool_tokens == 5691 * 16


def test_the_share_of_a_card_decides_the_pool_of_gpt2() -> None:
    """12 layers of 12 heads of 64, in 16 bits: 36,864 bytes a token. 0.2 of 16 GiB more are 5,825 blocks more."""
    pools = {}
    for share in (0.70, 0.90):
        budget = MemoryBudget(device=16 * GIB, utilization=share, weights=GIB // 4, other=GIB)
        pools[share] = planned(GPT2, budget=budget)
        assert pools[share].kv_bytes == int(16 * GIB * share) - GIB // 4 - GIB
        assert pools[share].bytes_per_token == 36_864
    assert pools[0.90].blocks - pools[0.70].blocks == int(0.2 * 16 * GIB) // (36_864 * 16)
    assert pools[0.70].max_concurrency == pools[0.70].blocks / 64


def test_latent_attention_keeps_one_vector_on_every_rank() -> None:
    """576 numbers of 2 bytes in each of 61 layers, however many ranks there are."""
    for ranks in (1, 8):
        shape = shape_of(DEEPSEEK_V3, tensor_parallel=ranks)
        assert sum(layer.bytes_per_token for layer in shape.layers) == 61 * 576 * 2


def test_heads_are_divided_among_ranks_and_one_is_kept_at_least() -> None:
    per_rank = {ranks: shape_of(LLAMA_3_8B, tensor_parallel=ranks).layers[0].bytes_per_token for ranks in (1, 4, 16)}
    assert per_rank == {1: 2 * 8 * 128 * 2, 4: 2 * 2 * 128 * 2, 16: 2 * 1 * 128 * 2}


def test_a_window_bounds_what_its_layers_keep_and_a_short_request_gains_nothing() -> None:
    settings = EngineSettings(max_num_batched_tokens=1024)
    pool = pool_of(shape_of(GEMMA_2), settings)
    windowed, full = pool.groups
    assert (windowed.layers, full.layers) == (13, 13)
    assert pool.blocks_of(8192) == 8192 // 16 + (4095 + 1024 + 15) // 16 + 1
    assert pool.blocks_of(160) == 10 + 10 + 1


def test_a_shared_prefix_is_held_once() -> None:
    """2,000 blocks less the null block; requests of 100 blocks that share 50 of them."""
    budget = MemoryBudget(kv=2000 * 16 * 128 * 1024)
    demand = ExpectedLoad(prompt=1200, output=400, shared_prefix=800)
    found = planned(LLAMA_3_8B, budget=budget, demand=demand)
    assert (found.blocks_per_request, found.requests_at_once) == (100, 19)
    assert found.requests_at_once_sharing == (1999 - 50) // 50
    assert (
        planned(LLAMA_3_8B, budget=budget, demand=ExpectedLoad(prompt=1200, output=400)).requests_at_once_sharing
        is None
    )


def test_what_does_not_fit_gets_the_length_that_does() -> None:
    found = planned(LLAMA_3_8B, budget=MemoryBudget(kv=101 * 16 * 128 * 1024))
    assert found.longest_request == 1600
    assert next((one.flag, one.value) for one in found.settings) == ("--max-model-len", "1600")
    fits = planned(LLAMA_3_8B, budget=MemoryBudget(kv=1000 * 16 * 128 * 1024))
    (length,) = (one for one in fits.settings if one.flag == "--max-model-len")
    assert (length.value, length.limits) == ("8192", False)


def test_eight_bits_hold_twice_as_many_tokens() -> None:
    half = plan_capacity(shape_of(LLAMA_3_8B, "fp8"), EngineSettings(), MemoryBudget(kv=8 * GIB), ExpectedLoad())
    assert half.pool_tokens == 2 * planned(LLAMA_3_8B).pool_tokens


def test_a_family_that_was_not_checked_is_named_as_an_assumption() -> None:
    assert "every layer of novel keeps full attention" in planned(LLAMA_3_8B | {"model_type": "novel"}).assumed[0]
    assert planned(LLAMA_3_8B).assumed == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{no_heads}", "--kv-cache-memory", "1G"], "config.json does not have attention heads: it lacks all of"),
        (["{list}", "--kv-cache-memory", "1G"], "is not a JSON object"),
        (["{text}", "--kv-cache-memory", "1G"], "is not JSON"),
        (["{missing}", "--kv-cache-memory", "1G"], "kvscope downloads no model"),
        (["{llama}"], "give --device-memory, --kv-cache-memory, or the engine's --log"),
        (["{llama}", "--device-memory", "24G"], "give --weights"),
        (["{llama}", "--device-memory", "24G", "--weights", "30G"], "raise --gpu-memory-utilization"),
        (
            ["{llama}", "--device-memory", "24G", "--weights", "3G", "--gpu-memory-utilization", "1.5"],
            "up to 1, not 1.5",
        ),
        (["{llama}", "--kv-cache-memory", "1K"], "one is never handed out: give the engine more memory"),
        (["{llama}", "--kv-cache-memory", "1G", "--prompt-len", "-5"], "--prompt-len is -5: give 0 to"),
        (["{llama}", "--kv-cache-memory", "1G", "--block-size", "0"], "--block-size is 0: it is at least 1"),
        (["{llama}", "--kv-cache-memory", "1G", "--kv-cache-dtype", "int3"], "is not one of auto, fp8"),
        (["{llama}", "--kv-cache-memory", "1G", "--release", "new"], "is not a release of vLLM: write 0.33"),
        (["--layers", "4", "--kv-cache-memory", "1G"], "give a MODEL, or --layers, --kv-heads and --head-dim"),
        (["{sparse}", "--kv-cache-memory", "1G"], "its sparse attention keeps an index"),
    ],
)
def test_bad_input_gets_a_sentence_with_the_remedy(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "no_heads": json.dumps({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}),
        "list": "[1, 2]",
        "text": "layers: 32",
        "llama": json.dumps(LLAMA_3_8B),
        "sparse": json.dumps(DEEPSEEK_V3 | {"model_type": "deepseek_v32"}),
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    paths = {name: str(tmp_path / name) for name in (*files, "missing")}
    assert main(["plan", *(one.format(**paths) for one in arguments)]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_the_table_fits_into_80_columns_and_json_has_the_same_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(GEMMA_2))
    arguments = ["plan", str(tmp_path), "--kv-cache-memory", "12G", "--prompt-len", "900", "--output-len", "100"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= 80
    assert main([*arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{found['requests_at_once']:,} at once" in table
    assert f"{found['blocks']:,} of {found['block_size']} tokens" in table
