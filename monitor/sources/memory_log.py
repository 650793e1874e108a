"""The memory facts in a line of a log: vLLM's breakdown in its wordings from 0.8 to 0.33, and kvscope's own.

Sizes are in GiB as printed, rounded to two decimals. Values printed in bytes stay in bytes. The alternatives of a fact
are its wordings: "total_gpu_memory", "take" and "takes" are of the engine of before V1, "Initial free memory",
"Requested memory" and "increase memory" of releases since 0.9 that log DEBUG. memory_consumed_gib, of weights and
non-torch memory together, is printed since 0.27. With memory_graphs_are_reserved the estimate is kept free of KV.
With memory_graphs_not_reserved it is not: the operator has turned that off.
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
    ("memory_graphs_not_reserved", re.compile(r"CUDA graph memory profiling is (disabled)")),
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
            if name in ("memory_graphs_are_reserved", "memory_graphs_not_reserved"):
                yield name, figure
            else:
                yield name, int(figure) if name.endswith("_bytes") else float(figure)
