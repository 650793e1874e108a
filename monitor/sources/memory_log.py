"""The memory facts in a line of a log: vLLM's breakdown in its wordings from 0.8 to 0.33, and kvscope's own.

Sizes are in GiB as printed, rounded to two decimals. Values printed in bytes stay in bytes.

    fact                             from
    -------------------------------  ------------------------------------------------------------------------------
    memory_free_gib, _total_gib      "Free memory on device (177.66/178.36 GiB) on startup"
    memory_requested_share, _gib     "Desired GPU memory utilization is (0.9, 160.53 GiB)"
    memory_weights_gib               "8.58 GiB for weight"
    memory_consumed_gib              "56.89 GiB for consumed memory (weights + non-torch)": since 0.27
    memory_activations_gib           "9.96 GiB for peak activation"
    memory_non_torch_gib             "0.07 GiB for non-torch memory"
    the same, with _total, _share    "total_gpu_memory (23.58GiB) x gpu_memory_utilization (0.99) = 23.35GiB", "model
                                     weights take 21.21GiB; non_torch_memory takes 0.20GiB; PyTorch activation peak
                                     memory takes 0.37GiB": the engine of before V1
    the same, with _free, _share     "Initial free memory: 23.08 GiB; Requested memory: 0.80 (util), 18.82 GiB", "torch
                                     peak memory increase: 1.40GiB; non-torch forward increase memory: 0.02GiB; weights
                                     memory: 8.80GiB": since 0.9, where it logs DEBUG
    model_loading_gib                "Model loading took 14.9889 GiB", "Loading model weights took 7.9692 GB"
    graph_capture_gib                "Graph capturing finished in 23 secs, took 0.54 GiB"
    memory_graphs_gib                "0.65 GiB for CUDAGraph memory"
    memory_graphs_estimated_gib      "Estimated CUDA graph memory: 0.36 GiB total"; "… (actual), 0.64 GiB (estimated)"
    memory_graphs_are_reserved       "CUDA graph memory profiling is enabled": the estimate is kept free of KV
    suggested_fit_requested_bytes    "`--kv-cache-memory=151519866880` to fit into requested memory"
    suggested_use_all_bytes          "`--kv-cache-memory=169914314752` to fully utilize gpu memory"
    kv_cache_in_use_bytes, _gib      "Current kv cache memory in use is 152379699200 bytes", "… is 27.85 GiB"
    kv_cache_reserved_gib            "reserved 20.0 GiB memory for KV Cache as specified by kv_cache_memory_bytes";
                                     "Explicitly set (0.06/11.21) GiB for KV cache on node 0";
                                     "the rest of the memory reserved for KV Cache is 1.57GiB"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

AMOUNT: Final = r"-?\d{1,12}(?:\.\d{1,12})?"
GIB_SIZE: Final = rf"({AMOUNT}) ?GiB"
BYTES: Final = r"-?\d{1,18}"

MEMORY_FACTS: Final[tuple[tuple[str, re.Pattern[str]], ...]] = (
    (
        "memory_free_gib",
        re.compile(
            rf"(?:Free memory on device \(({AMOUNT})/{AMOUNT} ?GiB\) on startup|Initial free memory: {GIB_SIZE};)"
        ),
    ),
    (
        "memory_total_gib",
        re.compile(rf"(?:Free memory on device \({AMOUNT}/{GIB_SIZE}\) on startup|total_gpu_memory \({GIB_SIZE}\))"),
    ),
    (
        "memory_requested_share",
        re.compile(
            rf"(?:Desired GPU memory utilization is \(({AMOUNT}), |Requested memory: ({AMOUNT}) \(util\)"
            rf"|gpu_memory_utilization \(({AMOUNT})\) = )"
        ),
    ),
    (
        "memory_requested_gib",
        re.compile(
            rf"(?:Desired GPU memory utilization is \({AMOUNT}, {GIB_SIZE}\)"
            rf"|Requested memory: {AMOUNT} \(util\), {GIB_SIZE}"
            rf"|gpu_memory_utilization \({AMOUNT}\) = {GIB_SIZE})"
        ),
    ),
    (
        "memory_weights_gib",
        re.compile(rf"(?:{GIB_SIZE} for weight|model weights take {GIB_SIZE};|weights memory: {GIB_SIZE}\.)"),
    ),
    ("memory_consumed_gib", re.compile(rf"{GIB_SIZE} for consumed memory")),
    (
        "memory_activations_gib",
        re.compile(
            rf"(?:{GIB_SIZE} for peak activation|PyTorch activation peak memory takes {GIB_SIZE};"
            rf"|torch peak memory increase: {GIB_SIZE};)"
        ),
    ),
    (
        "memory_non_torch_gib",
        re.compile(
            rf"(?:{GIB_SIZE} for non-torch memory|non_torch_memory takes {GIB_SIZE};"
            rf"|non-torch forward increase memory: {GIB_SIZE};)"
        ),
    ),
    ("memory_graphs_gib", re.compile(rf"{GIB_SIZE} for (?:CUDA|NPU ?)[Gg]raph memory")),
    (
        "memory_graphs_estimated_gib",
        re.compile(rf"(?:Estimated CUDA graph memory: |\(actual\), ){GIB_SIZE}(?: total| \(est)"),
    ),
    ("memory_graphs_are_reserved", re.compile(r"CUDA graph memory profiling is (enabled)")),
    ("model_loading_gib", re.compile(rf"(?:Model loading|Loading model weights) took ({AMOUNT}) Gi?B\b")),
    ("graph_capture_gib", re.compile(rf"Graph capturing finished in {AMOUNT} secs, took {GIB_SIZE}")),
    ("suggested_fit_requested_bytes", re.compile(rf"`--kv-cache-memory=({BYTES})`[^`]*? to fit into requested memory")),
    ("suggested_use_all_bytes", re.compile(rf"`--kv-cache-memory=({BYTES})`[^`]*? to fully utilize gpu memory")),
    ("kv_cache_in_use_bytes", re.compile(rf"Current kv cache memory in use is ({BYTES}) bytes")),
    ("kv_cache_in_use_gib", re.compile(rf"Current kv cache memory in use is {GIB_SIZE}")),
    (
        "kv_cache_reserved_gib",
        re.compile(
            rf"(?:reserved {GIB_SIZE} memory for KV Cache|Explicitly set \(({AMOUNT})/{AMOUNT}\) GiB for KV"
            rf"|memory reserved for KV Cache is {GIB_SIZE}\.)"
        ),
    ),
)
MEMORY_SIGNS: Final = ("GiB", "weights took", "graph memory profiling")
"""Few lines of a log have any of these, and all that is looked for has one."""


def memory_facts(text: str) -> Iterator[tuple[str, int | float | str]]:
    """Name and figure of each fact in a line."""
    if not any(sign in text for sign in MEMORY_SIGNS):
        return
    for name, pattern in MEMORY_FACTS:
        if (found := pattern.search(text)) is not None:
            figure = next(group for group in found.groups() if group is not None)
            if name == "memory_graphs_are_reserved":
                yield name, figure
            else:
                yield name, int(figure) if name.endswith("_bytes") else float(figure)
