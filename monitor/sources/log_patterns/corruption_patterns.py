"""Blocks that are freed twice, and free lists that contradict their counters, as assertions of the engines report
them.
"""

from __future__ import annotations

from typing import Final

from .pattern import LogPattern

CORRUPTION_PATTERNS: Final = (
    LogPattern(
        "freed_twice",
        "vllm",
        "0.1 to 0.8",
        "Double free!",
        r"Double free! .{1,160}? is already freed",
        "ValueError: Double free! PhysicalTokenBlock(device=Device.GPU, block_number=5663, ref_count=0) is already"
        " freed.",
    ),
    LogPattern(
        "kv_overwritten",
        "sglang",
        "0.5, with its canary",
        "canary violation",
        r"kv_canary violation: |KV cache canary violation detected",
        "[2026-05-24 03:51:46 TP0] KV cache canary violation detected (kernel_kind=verify, slot_idx=17, position=3)",
    ),
    LogPattern(
        "free_list_broken",
        "vllm",
        "0.9 to 0.33",
        "assert ",
        r"\bassert (?P<condition>(?:curr|first|last)_block is not None|block\.ref_c(?:nt|ount) (?:==|>) 0"
        r"|self\.num_free_blocks (?:>= n|== 0))",
        "ERROR 08-07 11:28:06 [core.py:1233]     assert curr_block is not None",
    ),
    LogPattern(
        "free_list_broken",
        "vllm",
        "0.9 to 0.33",
        "called on an invalid block",
        r"(?:remove|popleft)\(\) called on an invalid block",
        "RuntimeError: remove() called on an invalid block: KVCacheBlock(block_id=17, ref_cnt=0)",
    ),
    LogPattern(
        "free_list_broken",
        "vllm",
        "0.8 to 0.33",
        "free blocks from the pool",
        r"Cannot get (?P<blocks>\d{1,9}) free blocks from the pool",
        "ValueError: Cannot get 12 free blocks from the pool",
    ),
    LogPattern(
        "free_list_broken",
        "tensorrt-llm",
        "0.5 to 1.2",
        "Assertion failed: ",
        r"Assertion failed: (?P<condition>(?:mNextBlocks|mPrevBlock|freeBlockIterator|block|hasFreeBlocks|mRefCount"
        r"|mHasRefs|!?\w{0,20}hasRefs|No free block|Can't allocate new blocks|Can't find)[^()]{0,60}"
        r"(?:\(\))?[^()]{0,60}) \(\S{1,200}(?:kvCacheManager|evictionPolicy)\w{0,20}\.cpp:\d{1,6}\)",
        "[TensorRT-LLM][ERROR] Assertion failed: mNextBlocks.empty()"
        " (/src/cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp:160)",
    ),
)
