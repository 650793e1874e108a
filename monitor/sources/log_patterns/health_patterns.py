"""Engines, workers and front ends: what stands still, what died, what starts anew, what still answers."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.sources.log_patterns.pattern import LogPattern

HEALTH_PATTERNS: Final = (
    LogPattern(
        "worker_wait",
        "vllm",
        "0.6 to 0.33",
        "broadcast block found",
        r"No available shared memory broadcast block found in (?P<seconds>\d{1,6}) ?seconds?",
        "INFO 07-15 15:33:47 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds.",
    ),
    LogPattern(
        "worker_wait",
        "vllm",
        "0.5 to 0.10",
        "No available block found in",
        r"No available block found in (?P<seconds>\d{1,6}) ?seconds?",
        "WARNING 05-02 10:00:00 [shm_broadcast.py:394] No available block found in 60 second.",
    ),
    LogPattern(
        "call_timed_out",
        "vllm",
        "0.8 to 0.33",
        "RPC call to ",
        r"RPC call to (?P<call>\w{1,60}) timed out",
        "TimeoutError: RPC call to sample_tokens timed out.",
    ),
    LogPattern(
        "call_timed_out",
        "vllm",
        "0.4 to 0.9",
        "iteration timed out",
        r"Engine iteration timed out",
        "ERROR 06-03 10:00:00 async_llm_engine.py:663] Engine iteration timed out. This should never happen!",
    ),
    LogPattern(
        "input_dumped",
        "vllm",
        "0.8 to 0.33",
        "Dumping input data",
        r"Dumping input data(?: for V1 LLM engine)?",
        "ERROR 01-17 07:41:55 [dump_input.py:69] Dumping input data for V1 LLM engine (v0.10.3) with config:"
        " model='m',",
    ),
    LogPattern(
        "watchdog_expired",
        "sglang",
        "0.3 to 0.5",
        "Watchdog timeout",
        r"Watchdog timeout \(self\.watchdog_timeout=(?P<seconds>\d{1,6})",
        "[2025-06-06 01:56:27 TP0] Watchdog timeout (self.watchdog_timeout=300)",
    ),
    LogPattern(
        "watchdog_expired",
        "any",
        "NCCL with PyTorch 2.0 to 2.9",
        "collective operation timeout",
        r"Watchdog caught collective operation timeout",
        "[rank1]:[E1120 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 1] Watchdog caught collective operation"
        " timeout: Work",
    ),
    LogPattern(
        "engine_died",
        "vllm",
        "0.8 to 0.33",
        "Engine",
        r"EngineDeadError|EngineCore encountered an? (?:fatal error|issue|unrecoverable \w{1,20})"
        r"|Engine core (?:proc|process) \S{1,60} died|AsyncEngineDeadError|EngineGenerateError",
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
    ),
    LogPattern(
        "engine_died",
        "vllm",
        "0.2 to 0.9",
        "Background loop",
        r"Background loop (?:has errored already|is stopped|is not running)",
        "vllm.engine.async_llm_engine.AsyncEngineDeadError: Background loop has errored already.",
    ),
    LogPattern(
        "worker_died",
        "vllm",
        "0.8 to 0.33",
        "died unexpectedly",
        r"Worker proc \S{1,60} died unexpectedly",
        "ERROR 11-20 10:00:00 [multiproc_executor.py:154] Worker proc VllmWorker-1 died unexpectedly, shutting down.",
    ),
    LogPattern(
        "worker_died",
        "sglang",
        "0.3 to 0.5",
        "sigquit",
        r"Received sigquit from a child process",
        "[2025-06-06 01:56:27] Received sigquit from a child process. It usually means the child failed.",
    ),
    LogPattern(
        "start_up",
        "vllm",
        "0.2 to 0.33",
        "itializing a",
        r"Initializing an? (?:V\d )?LLM engine",
        "INFO 01-11 15:51:02 llm_engine.py:70] Initializing an LLM engine with config: model='m'",
    ),
    LogPattern(
        "start_up",
        "vllm",
        "0.5 to 0.33",
        "vLLM API server version",
        r"vLLM API server version \S{1,40}",
        "INFO 11-20 23:35:01 [api_server.py:1900] vLLM API server version 0.11.0",
    ),
    LogPattern(
        "start_up",
        "sglang",
        "0.2 to 0.5",
        "server_args=",
        r"server_args=ServerArgs\(",
        "[2025-10-22 20:20:08] server_args=ServerArgs(model_path='m', tokenizer_path='m')",
    ),
    LogPattern(
        "start_up_done",
        "vllm, sglang",
        "0.2 to 0.33",
        "tartup complete",
        r"Application startup complete",
        "INFO:     Application startup complete.",
    ),
    LogPattern(
        "start_up_done",
        "vllm",
        "0.8 to 0.33",
        "init engine",
        r"init engine \(profile, create kv.?cache, warmup model\) took",
        "INFO 04-14 22:04:44 [core.py:162] init engine (profile, create kv cache, warmup model) took 137.48 seconds",
    ),
    LogPattern(
        "front_end_answers",
        "vllm, sglang",
        "0.2 to 0.33",
        '" 200',
        r'"GET (?P<path>/(?:health|metrics|version|ping|v1/models|get_model_info|health_generate))[^"]{0,40}HTTP/1\.\d"'
        r" 200",
        'INFO:     127.0.0.1:35104 - "GET /health HTTP/1.1" 200 OK',
    ),
    LogPattern(
        "kernel_compiled",
        "vllm",
        "0.20 to 0.33",
        "JIT compilation during inference",
        r"(?:Triton )?kernel JIT compilation during inference",
        "WARNING 07-15 15:32:43 [jit_monitor.py:135] Triton kernel JIT compilation during inference: _a_kernel.",
    ),
)
