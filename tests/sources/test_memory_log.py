"""Memory lines as vLLM wrote them from 0.8 to 0.33, and as kvscope does; in part, cut short and in real logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.contract.samples import Fact
from kvscope.monitor.sources.log_file import read_log
from kvscope.monitor.sources.memory_log import memory_facts

DATA = Path(__file__).parent.parent / "data"
SEED = (DATA / "seed-002.log").read_text()
HEAD = "Free memory on device (94.05/95.01 GiB) on startup. Desired GPU memory utilization is (0.9, 85.51 GiB). "
WORDINGS = {
    "0.8, the engine of before V1, what it may use": (
        "(VllmWorkerProcess pid=507) INFO 04-12 08:21:19 [worker.py:267] the current vLLM instance can use"
        " total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB",
        {"memory_total_gib": 23.58, "memory_requested_share": 0.99, "memory_requested_gib": 23.35},
    ),
    "0.8, the engine of before V1, what it uses": (
        "(VllmWorkerProcess pid=507) INFO 04-12 08:21:19 [worker.py:267] model weights take 21.21GiB; non_torch_memory"
        " takes 0.20GiB; PyTorch activation peak memory takes 0.37GiB; the rest of the memory reserved for KV Cache is"
        " 1.57GiB.",
        {
            "memory_weights_gib": 21.21,
            "memory_non_torch_gib": 0.2,
            "memory_activations_gib": 0.37,
            "kv_cache_reserved_gib": 1.57,
        },
    ),
    "0.8, weights": ("Model loading took 14.9889 GiB and 3.652170 seconds", {"model_loading_gib": 14.9889}),
    "0.8, the engine of before V1, weights": ("Loading model weights took 7.9692 GB", {"model_loading_gib": 7.9692}),
    "0.8, graphs": ("Graph capturing finished in 23 secs, took 0.54 GiB", {"graph_capture_gib": 0.54}),
    "0.9 to 0.33, DEBUG, what it may use": (
        "(EngineCore_DP0 pid=255) DEBUG 09-28 21:12:43 [v1/worker/gpu_worker.py:284] Initial free memory: 23.08 GiB;"
        " Requested memory: 0.80 (util), 18.82 GiB",
        {"memory_free_gib": 23.08, "memory_requested_share": 0.8, "memory_requested_gib": 18.82},
    ),
    "0.9 to 0.33, DEBUG, what it uses": (
        "Memory profiling takes 9.40 seconds. Total non KV cache memory: 10.22GiB; torch peak memory increase: 1.40GiB;"
        " non-torch forward increase memory: 0.02GiB; weights memory: 8.80GiB.",
        {"memory_activations_gib": 1.4, "memory_non_torch_gib": 0.02, "memory_weights_gib": 8.8},
    ),
    "0.10.2": (
        SEED,
        {
            "memory_free_gib": 177.66,
            "memory_total_gib": 178.36,
            "memory_requested_share": 0.9,
            "memory_requested_gib": 160.53,
            "memory_weights_gib": 8.58,
            "memory_activations_gib": 9.96,
            "memory_non_torch_gib": 0.07,
            "memory_graphs_gib": 0.65,
            "suggested_fit_requested_bytes": 151519866880,
            "suggested_use_all_bytes": 169914314752,
            "kv_cache_in_use_bytes": 152379699200,
        },
    ),
    "0.27, in full": (
        f"(Worker_TP1 pid=771) INFO 08-21 18:22:06 [gpu_worker.py:789] {HEAD}Actual usage is 56.89 GiB for consumed"
        " memory (weights + non-torch), 0.8 GiB for peak activation, and 0.32 GiB for CUDAGraph memory. Replace"
        " gpu_memory_utilization config with `--kv-cache-memory=29407858586` (27.39 GiB) to fit into requested memory,"
        " or `--kv-cache-memory=38581581312` (35.93 GiB) to fully utilize gpu memory. Current kv cache memory in use is"
        " 27.85 GiB.",
        {
            "memory_free_gib": 94.05,
            "memory_total_gib": 95.01,
            "memory_requested_share": 0.9,
            "memory_requested_gib": 85.51,
            "memory_consumed_gib": 56.89,
            "memory_activations_gib": 0.8,
            "memory_graphs_gib": 0.32,
            "suggested_fit_requested_bytes": 29407858586,
            "suggested_use_all_bytes": 38581581312,
            "kv_cache_in_use_gib": 27.85,
        },
    ),
    "a negative suggestion": (
        "Replace gpu_memory_utilization config with `--kv-cache-memory=-7517` (-0.0 GiB) to fit into requested memory.",
        {"suggested_fit_requested_bytes": -7517},
    ),
    "graphs, estimated and not": (
        "CUDA graph pool memory: 0.19 GiB (actual), 0.64 GiB (estimated), difference: 0.45 GiB (244.2%).",
        {"memory_graphs_estimated_gib": 0.64},
    ),
    "graphs, estimated": ("Estimated CUDA graph memory: -20.50 GiB total", {"memory_graphs_estimated_gib": -20.5}),
    "graphs, kept free": (
        "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.82 is",
        {"memory_graphs_are_reserved": "enabled"},
    ),
    "0.11, told how large": (
        "Initial free memory 94.05 GiB, reserved 20.0GiB memory for KV Cache as specified by kv_cache_memory_bytes"
        " config and skipped memory profiling. This does does not respect the gpu_memory_utilization config.",
        {"kv_cache_reserved_gib": 20.0},
    ),
    "CPU": ("Explicitly set (0.06/11.21) GiB for KV cache on node 0.", {"kv_cache_reserved_gib": 0.06}),
    "something else in GiB": ("Checkpoint size: 0.00 GiB. Available RAM: 21.47 GiB.", {}),
}


@pytest.mark.parametrize("version", WORDINGS)
def test_the_wordings_of_every_version(version: str) -> None:
    line, expected = WORDINGS[version]
    assert dict(memory_facts(line)) == expected


@pytest.mark.parametrize("version", WORDINGS)
def test_a_line_cut_at_any_byte_says_less_but_nothing_false(version: str) -> None:
    line, expected = WORDINGS[version]
    for end in range(len(line)):
        assert dict(memory_facts(line[:end])).items() <= expected.items(), line[:end]


@pytest.mark.parametrize(("log", "tokens", "concurrency"), [("startup", 16_384, 4.0), ("startup-refused", 8_192, 2.0)])
def test_the_size_of_the_pool_in_real_logs(log: str, tokens: int, concurrency: float) -> None:
    _, records = read_log(DATA / f"{log}.log.gz")
    facts = {record.name: record.value for record in records if isinstance(record, Fact)}
    assert (facts["kv_cache_size_tokens"], facts["max_concurrency"]) == (tokens, concurrency)
    assert tokens / facts["max_model_len"] == concurrency  # type: ignore[operator]
    assert facts["kv_cache_reserved_gib"] == round(facts["kv_cache_memory_bytes"] / 2**30, 2)  # type: ignore[operator]
    assert not any(name.startswith("memory_") for name in facts)
