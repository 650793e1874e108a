"""Engines that do not start for want of memory, and devices that run out of it."""

from __future__ import annotations

import re
from typing import Final

from .pattern import LineFields, LogPattern, gib

N: Final = r"\d{1,12}(?:\.\d{1,6})?"
_SIZE_WITH_UNIT: Final = rf"({N}) ?([KMG]i?B)"
_OF_AN_OOM: Final = {
    "tried_gib": re.compile(rf"Tried to allocate {_SIZE_WITH_UNIT}", re.ASCII),
    "total_gib": re.compile(rf"(?:total capacity of {_SIZE_WITH_UNIT}|; {_SIZE_WITH_UNIT} total capacity)", re.ASCII),
    "free_gib": re.compile(rf"(?:of which {_SIZE_WITH_UNIT} is free|; {_SIZE_WITH_UNIT} free)", re.ASCII),
    "this_process_gib": re.compile(rf"this process has {_SIZE_WITH_UNIT} memory in use", re.ASCII),
    "in_use_gib": re.compile(rf"Process \d{{1,9}} has {_SIZE_WITH_UNIT} memory in use", re.ASCII),
    "allocated_gib": re.compile(
        rf"(?:{_SIZE_WITH_UNIT} is allocated by PyTorch|; {_SIZE_WITH_UNIT} already allocated)", re.ASCII
    ),
    "graphs_gib": re.compile(rf"with {_SIZE_WITH_UNIT} allocated in private pools", re.ASCII),
}


def _out_of_memory(match: re.Match[str]) -> LineFields:
    """Return the sums of an out-of-memory error, in GiB. Memory of other processes is added up."""
    fields: LineFields = {}
    for name, expression in _OF_AN_OOM.items():
        sizes = [
            gib(*[part for part in found.groups() if part is not None][:2])
            for found in expression.finditer(match.string, match.start())
        ]
        if sizes:
            fields[name] = sizes[0]
            if name == "in_use_gib":
                fields["processes"] = len(sizes)
                fields[name] = round(sum(sizes), 4)
    return fields


REFUSAL_PATTERNS: Final = (
    LogPattern(
        "refused_for_length",
        "vllm",
        "0.8.2 to 0.33",
        "max seq len",
        rf"max seq len \((?P<max_len>\d{{1,12}})\),? ?\(?(?P<needed_gib>{N}) GiB ?(?:of )?KV ?cache is needed, which is"
        rf" ?larger than the available KV cache memory ?\((?P<available_gib>{N}) ?GiB\)"
        r"(?:.{0,80}?estimated maximum model length is (?P<fitting_len>\d{1,12}))?",
        "ValueError: To serve at least one request with the model's max seq len (100000), (4.26 GiB KV cache is needed,"
        " which is larger than the available KV cache memory (4.25 GiB). Based on the available memory, the estimated"
        " maximum model length is 99712.",
    ),
    LogPattern(
        "refused_for_length",
        "vllm",
        "0.2.6 to 0.11",
        "can be stored in",
        r"max seq len \((?P<max_len>\d{1,12})\) is larger than the maximum number of tokens that can be stored in"
        r" ?(?:the )?KV ?cache ?\((?P<pool_tokens>\d{1,12})\)",
        "ValueError: The model's max seq len (4096) is larger than the maximum number of tokens that can be"
        " stored in KV"
        " cache (3664). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.",
    ),
    LogPattern(
        "refused_without_pool",
        "vllm",
        "0.2 to 0.33",
        "for the cache blocks",
        r"(?:Error: .{0,40})?No available memory for the cache blocks",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    ),
    LogPattern(
        "refused_without_pool",
        "vllm",
        "0.8 to 0.33",
        "Available KV cache memory: -",
        rf"Available KV cache memory: (?P<pool_gib>-{N}) GiB",
        "INFO 03-01 12:00:01 [gpu_worker.py:227] Available KV cache memory: -1.27 GiB",
    ),
    LogPattern(
        "refused_without_pool",
        "vllm",
        "0.2 to 0.9",
        " blocks: ",
        r"# (?:GPU|cuda|CUDA) blocks: (?P<pool_blocks>0|-\d{1,12})\b",
        "INFO 01-11 15:51:18 llm_engine.py:275] # GPU blocks: 0, # CPU blocks: 512",
    ),
    LogPattern(
        "refused_for_other_processes",
        "vllm",
        "0.10 to 0.33",
        "on startup is less than",
        rf"Free memory on device (?:\S{{1,20}} )?\((?P<free_gib>{N})/(?P<total_gib>{N}) ?GiB\) on startup is less than"
        rf" desired GPU memory utilization \((?P<share>{N}), (?P<desired_gib>{N}) GiB\)",
        "ValueError: Free memory on device (7.62/23.57 GiB) on startup is less than desired GPU memory"
        " utilization (0.9,"
        " 21.21 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.",
    ),
    LogPattern(
        "profile_disturbed",
        "vllm",
        "0.4 to 0.33",
        "Error in memory profiling",
        rf"Error in memory profiling\. Initial free memory:? (?P<initial>{N})(?: GiB)?,"
        rf" current free memory:? (?P<current>{N})",
        "AssertionError: Error in memory profiling. Initial free memory 20.31 GiB, current free memory 21.02 GiB. This"
        " happens when other processes sharing the same container release GPU memory while vLLM is profiling.",
    ),
    LogPattern(
        "refused_without_pool",
        "sglang",
        "0.1 to 0.5",
        "--mem-fraction-static",
        r"Error: Not enough memory\. Please try (?:to )?increas(?:e|ing) --mem-fraction-static",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
    ),
    LogPattern(
        "refused_without_pool",
        "sglang",
        "0.4 to 0.5",
        "is larger than the profiled value",
        r"max_total_tokens=\d{1,12} is larger than the profiled value (?P<pool_tokens>-\d{1,12}|0)\b",
        "[2025-07-02 07:41:59 TP0] max_total_tokens=131072 is larger than the profiled value -561981. Use the profiled"
        " value instead.",
    ),
    LogPattern(
        "refused_without_pool",
        "text-generation-inference",
        "0.9 to 3.2",
        "Not enough memory to handle",
        r"Not enough memory to handle (?P<prefill_tokens>\d{1,9}) (?:prefill|total|input) tokens",
        "RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease"
        " `--max-batch-prefill-tokens`",
    ),
    LogPattern(
        "refused_without_pool",
        "tensorrt-llm",
        "0.5 to 0.20",
        "must be large enough to process at least 1 sequence",
        r"maxTokensInPagedKvCache(?: \((?P<configured_tokens>\d{1,12})\))? must be large enough to process at least 1"
        r" sequence",
        "[TensorRT-LLM][ERROR] maxTokensInPagedKvCache must be large enough to process at least 1 sequence to"
        " completion (i.e. must be larger than beam_width * tokensPerBlock * maxBlocksPerSeq)",
    ),
    LogPattern(
        "refused_without_pool",
        "tensorrt-llm",
        "0.17 to 1.2",
        "insufficient GPU memory",
        r"Executor creation failed due to insufficient GPU memory",
        "RuntimeError: Executor creation failed due to insufficient GPU memory.",
    ),
    LogPattern(
        "out_of_memory",
        "any",
        "PyTorch 1.8 to 2.9",
        "out of memory",
        r"(?:(?:CUDA|HIP|XPU|NPU|MUSA|GPU)(?: [Ee]rror:)? out of memory"
        r"(?:\.(?: Tried to allocate .{0,40})?|\"| occurred when warming up)|Error: (?:CUDA|HIP) error: out of memory"
        r"|Tried to allocate [\d.]{1,12} [KMG]i?B\. GPU \d{1,3} has a total capacity of)",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.74 GiB. GPU 1 has a total capacity of"
        " 23.57 GiB"
        " of which 605.88 MiB is free. Process 133288 has 22.97 GiB memory in use. Of the allocated memory 20.21 GiB is"
        " allocated by PyTorch, with 128.00 MiB allocated in private pools (e.g., CUDA Graphs), and 185.98 MiB"
        " is reserved"
        " by PyTorch but unallocated.",
        _out_of_memory,
    ),
    LogPattern(
        "frame_of_weights",
        "vllm, sglang",
        "0.2 to 0.33",
        ", in ",
        r'File "[^"]{1,300}", line \d{1,6}, in (?P<function>load_model|load_weights|process_weights_after_loading'
        r"|_initialize_model|initialize_model|create_weights)\b",
        '  File "/usr/lib/python3/vllm/worker/model_runner.py", line 1112, in load_model',
    ),
    LogPattern(
        "frame_of_profile",
        "vllm, sglang",
        "0.2 to 0.33",
        ", in ",
        r'File "[^"]{1,300}", line \d{1,6}, in (?P<function>profile_run|determine_available_memory'
        r"|determine_num_available_blocks|profile_num_available_blocks)\b",
        '  File "/usr/lib/python3/vllm/worker/worker.py", line 229, in determine_num_available_blocks',
    ),
    LogPattern(
        "frame_of_profile",
        "text-generation-inference",
        "0.9 to 3.2",
        "Method Warmup",
        r"Method Warmup encountered an error",
        "2024-04-19T11:06:25Z ERROR text_generation_launcher: Method Warmup encountered an error.",
    ),
    LogPattern(
        "frame_of_pool",
        "vllm, sglang",
        "0.2 to 0.33",
        ", in ",
        r'File "[^"]{1,300}", line \d{1,6}, in (?P<function>initialize_kv_cache\w{0,20}|_allocate_kv_cache\w{0,20}'
        r"|initialize_from_config|initialize_cache|init_memory_pool|_create_buffers)\b",
        '  File "/usr/lib/python3/vllm/v1/worker/gpu_model_runner.py", line 4123, in initialize_kv_cache',
    ),
    LogPattern(
        "frame_of_graphs",
        "vllm",
        "0.8 to 0.33",
        "occurred when warming up",
        r"out of memory occurred when warming up (?P<function>sampler|pooler) with",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try"
        " lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
    ),
    LogPattern(
        "frame_of_graphs",
        "vllm, sglang",
        "0.2 to 0.33",
        ", in ",
        r'File "[^"]{1,300}", line \d{1,6}, in (?P<function>capture_model|_capture_cudagraphs|capture_one_batch_size'
        r"|init_cuda_graphs|init_device_graphs|_dummy_sampler_run|compile_or_warm_up_model)\b",
        '  File "/usr/lib/python3/vllm/v1/worker/gpu_worker.py", line 291, in compile_or_warm_up_model',
    ),
    LogPattern(
        "frame_of_graphs",
        "any",
        "PyTorch 2.0 to 2.9",
        "torch/cuda/graphs.py",
        r'File "[^"]{1,300}torch/cuda/graphs\.py", line \d{1,6}, in (?P<function>__enter__|__exit__|capture_begin'
        r"|capture_end)\b",
        '  File "/usr/lib/python3/torch/cuda/graphs.py", line 84, in capture_end',
    ),
    LogPattern(
        "frame_of_step",
        "vllm, sglang",
        "0.2 to 0.33",
        ", in ",
        r'File "[^"]{1,300}", line \d{1,6}, in (?P<function>execute_model|step_async|engine_step|run_busy_loop'
        r"|event_loop_\w{1,20}|forward_batch_generation|_process_engine_step|sample_tokens)\b",
        '  File "/usr/lib/python3/vllm/v1/engine/core.py", line 604, in run_busy_loop',
    ),
)
