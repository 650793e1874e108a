"""A pool under pressure: preemptions, retractions, prompts that cannot fit, the size of pools and blocks."""

from __future__ import annotations

import re
from typing import Final

from .pattern import LineFields, LogPattern


def _request_size(match: re.Match[str]) -> LineFields:
    size = float(match["size"].replace(",", ""))
    return {"tokens": round(size * (1000 if match["thousands"] else 1))}


PRESSURE_PATTERNS: Final = (
    LogPattern(
        "request_preempted",
        "vllm",
        "0.3 to 0.10",
        "is preempted by",
        r"(?:Sequence group \S{1,120} )?is preempted by"
        r" PreemptionMode\.(?P<mode>\w{1,20}) mode because there is not enough KV ?cache space"
        r"(?:.{0,240}?total_num_cumulative_preemption=(?P<total>\d{1,12}))?",
        "WARNING 10-28 11:16:41 scheduler.py:1483] Sequence group chat-1 is preempted by PreemptionMode.SWAP"
        " mode because"
        " there is not enough KV cache space. This can affect the end-to-end performance. Increase"
        " gpu_memory_utilization"
        " or tensor_parallel_size to provide more KV cache memory. total_num_cumulative_preemption=1",
    ),
    LogPattern(
        "request_preempted",
        "vllm",
        "vllm-ascend's schedulers, 0.18 to 0.22",
        "] Preempted request",
        r"\] Preempted request \S{1,120}",
        "INFO 06-21 10:12:21 [recompute_scheduler.py:400] [RecomputeScheduler] Preempted request cmpl-1."
        " running_count=7, token_budget=0",
    ),
    LogPattern(
        "requests_retracted",
        "sglang",
        "0.2 to 0.5",
        "etract",
        r"(?:KV cache pool is full\. Retract requests|Decode out of memory happened|Retract requests)\."
        r".{0,60}?#retracted_reqs: (?P<requests>\d{1,9})",
        "[2026-05-24 03:51:46 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 1,"
        " #aborted_retracted_reqs: 0,"
        " #new_tokens_gained: 12, #new_token_ratio: 0.3082 -> 0.6012",
    ),
    LogPattern(
        "batch_out_of_memory",
        "sglang",
        "0.2 to 0.5",
        "out of memory. Try to lower your batch size",
        r"(?P<phase>Prefill|Decode) out of memory\. Try to lower your batch size",
        "[2025-03-01 10:00:00 TP0] Prefill out of memory. Try to lower your batch size.",
    ),
    LogPattern(
        "last_request_too_large",
        "sglang",
        "0.3 to 0.5",
        "No space left for only one request|retract_decode: aborted",
        r"No space left for only one request|retract_decode: aborted (?:last )?request",
        "AssertionError: No space left for only one request, self.token_to_kv_pool_allocator.available_size()=0",
    ),
    LogPattern(
        "swap_space_exhausted",
        "vllm",
        "0.1 to 0.10",
        "lack of CPU swap space",
        r"Aborted due to the lack of CPU swap space",
        "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space to avoid this error.",
    ),
    LogPattern(
        "prompt_rejected",
        "vllm",
        "0.2 to 0.9",
        "exceeds the capacity of block_manager",
        r"Input prompt \((?P<tokens>\d{1,12}) tokens\)(?: is too long and"
        r"|.{0,60}) exceeds the capacity of block_manager",
        "WARNING 06-03 10:00:00 scheduler.py:706] Input prompt (9000 tokens) is too long and exceeds the capacity of"
        " block_manager",
    ),
    LogPattern(
        "attention_block_size",
        "vllm",
        "0.10 to 0.33",
        "attention block size to",
        r"Setting attention block size to (?P<tokens>\d{1,9}) tokens",
        "INFO [config.py:281] Setting attention block size to 528 tokens to ensure that attention page size is >= mamba"
        " page size.",
    ),
    LogPattern(
        "worker_pool",
        "vllm",
        "0.8 to 0.33",
        "Available KV cache memory: ",
        r"Available KV cache memory: (?P<pool_gib>\d{1,6}(?:\.\d{1,4})?) GiB",
        "(Worker_TP0 pid=1366) INFO 04-14 22:03:31 [gpu_worker.py:227] Available KV cache memory: 45.94 GiB",
    ),
    LogPattern(
        "model_length",
        "vllm",
        "0.9 to 0.33",
        "Using max model len",
        r"Using max model len (?P<tokens>\d{1,12})",
        "INFO 04-15 07:22:41 [model.py:1500] Using max model len 262144",
    ),
    LogPattern(
        "request_size",
        "any",
        "a sentence",
        "token",
        r"\b(?:requests?|prompts?|inputs?"
        r"|context)\b[^.:\n]{0,40}?\b(?P<size>\d[\d,]{0,12}) ?(?P<thousands>[kK]?)[ -]?tokens?\b(?!/)",
        "Send a request of about 100k tokens.",
        _request_size,
    ),
    LogPattern(
        "graphs_captured",
        "vllm",
        "0.4 to 0.33",
        "Captur",
        r"Capturing (?:the model for CUDA graphs|cudagraphs for decoding|CUDA graph shapes)",
        "INFO 12-20 20:25:49 model_runner.py:1413] Capturing cudagraphs for decoding. This may lead to unexpected",
    ),
    LogPattern(
        "pool_allocated",
        "sglang",
        "0.2 to 0.5",
        "KV Cache is allocated",
        r"KV Cache is allocated\..{0,40}?#tokens: (?P<tokens>[\d,]{1,15})",
        "[2025-10-22 20:21:08] KV Cache is allocated. #tokens: 367404, K size: 8.23 GB, V size: 8.23 GB",
    ),
    LogPattern(
        "pool_allocated",
        "tensorrt-llm",
        "0.9 to 1.2",
        "in paged KV cache",
        r"Allocated (?P<pool_gib>[\d.]{1,12}) GiB for max tokens in paged KV cache \((?P<tokens>\d{1,12})\)",
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 12.35 GiB for max tokens in paged KV cache (1011712).",
    ),
    LogPattern(
        "pool_allocated",
        "tensorrt-llm",
        "0.5 to 0.8",
        "tokens in paged KV cache",
        r"Using (?P<tokens>\d{1,12}) (?:total )?tokens in paged KV cache",
        "[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.",
    ),
)
