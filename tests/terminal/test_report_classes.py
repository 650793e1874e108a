"""Classes of reports that rules were learned from, in other words and releases, and texts that only look alike.

Each class has the sentences that an engine prints, as its source has them, and a text beside it that must stay quiet.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.log_file import read_log
from kvscope.monitor.terminal.cli import main

SHOWN = {
    "V0 frees a block twice": (
        "corrupt.double-free",
        "ERROR 02-11 08:00:00 async_llm_engine.py:52] ValueError: Double free! PhysicalTokenBlock(device=Device.CPU,"
        " block_number=7, ref_count=0) is already freed.",
    ),
    "V1 finds an invalid block in its list": (
        "corrupt.counter-drift",
        "(EngineCore pid=9) ERROR 08-07 11:28:06 [core.py:1233] RuntimeError: remove() called on an invalid block:"
        " KVCacheBlock(block_id=17, ref_cnt=0)",
    ),
    "V1 asserts a reference count": (
        "corrupt.counter-drift",
        "ERROR 08-07 11:28:06 [core.py:700]     assert block.ref_cnt == 0",
    ),
    "TensorRT-LLM finds no leaf": (
        "corrupt.counter-drift",
        "[TensorRT-LLM][ERROR] Assertion failed: No free block found. This shouldn't happen!"
        " (/src/cpp/tensorrt_llm/batch_manager/evictionPolicy.cpp:88)",
    ),
    "LMCache cannot load what it has": (
        "stuck.remote-load",
        "[2026-01-27 01:40:09,923] LMCache WARNING: Request chatcmpl-1 failed to load 256 tokens across 16 blocks"
        " (vllm_v1_adapter.py:1125:lmcache.integration.vllm.vllm_v1_adapter)",
    ),
    "NIXL cannot set up a transfer": (
        "stuck.remote-load",
        "(Worker_TP0 pid=8) ERROR 05-01 15:00:23 [worker.py:767] NIXL transfer failure: transfer_setup_failed |"
        " Context: {'failure_type': 'transfer_setup_failed'}",
    ),
    "SGLang's transfer does not begin": (
        "stuck.remote-load",
        "[2026-01-03 07:32:08 TP1] Some requests timed out when bootstrapping, which means prefill instances fail to"
        " receive the KV indices from the decode instance of this request.",
    ),
    "Mooncake's lease ends": (
        "leak.lease-burst",
        "WARNING 02-11 10:12:21 [mooncake_connector.py:910] Request cmpl-1 timed out after 480 seconds without being"
        " sent. Freeing its blocks on the producer side.\n"
        "WARNING 02-11 10:12:25 [mooncake_connector.py:910] Request cmpl-2 timed out after 480 seconds without being"
        " sent. Freeing its blocks on the producer side.",
    ),
    "a host tier refuses most stores": (
        "stuck.outer-tier",
        "INFO 11-29 17:37:22 [metrics.py:103] KV Transfer metrics: vllm:kv_offload_lookup_sync_delay_seconds_count=31,"
        " vllm:kv_offload_allocation_failure=341, vllm:kv_offload_cpu_cache_usage_perc=0.0,"
        " vllm:kv_offload_cpu_allocation_size_count=341, vllm:kv_offload_cpu_allocation_size_sum=5115",
    ),
    "MoRIIO's lease ends": (
        "leak.lease-burst",
        "WARNING 06-21 10:12:21 [moriio_connector.py:1582] Reaped 2 deferred sends with no finished_sending"
        " notification after 60s. This indicates lost async KV completion notifications from the KV connector.\n"
        "WARNING 06-21 10:13:21 [moriio_connector.py:1582] Reaped 1 deferred sends with no finished_sending"
        " notification after 60s. This indicates lost async KV completion notifications from the KV connector.",
    ),
    "a push that comes after its lease": (
        "corrupt.stale-remote-read",
        "ERROR 06-21 10:12:21 [push_worker.py:790] Unrecognized request cmpl-1 notif (may have expired).",
    ),
    "MoRIIO reads for too long": (
        "stuck.remote-load",
        "ERROR 06-21 10:12:21 [moriio_connector.py:1901] RDMA read TIMED OUT for req cmpl-1 after 30.0s"
        " (kv_connector_extra_config.recv_abort_timeout=30)",
    ),
    "LMCache retrieves too few tokens": (
        "stuck.remote-load",
        "(Worker pid=7) ERROR 06-21 10:12:21 [vllm_v1_adapter.py:930] The number of retrieved tokens is less than the"
        " expected number of tokens! This should not happen!",
    ),
    "an Ascend store that does not return its keys": (
        "stuck.remote-load",
        "ERROR 06-21 10:12:21 [mooncake_backend.py:120] Failed to get 3 keys out of 48. error_codes=[-704]. Check key"
        " existence and memory state.",
    ),
    "SGLang loses its prefill side": (
        "stuck.remote-load",
        "[2026-05-24 03:51:46 TP0] Lost connection with prefill instance (bootstrap_addr: 10.0.0.7:8998), 12 requests"
        " affected",
    ),
    "V0 refuses a prompt": (
        "stuck.never-fits",
        "WARNING 06-03 10:00:00 scheduler.py:706] Input prompt (9000 tokens) is too long and exceeds the capacity of"
        " block_manager",
    ),
    "SGLang's pool is below its context": (
        "sizing.kv-too-small",
        "[2026-05-24 03:51:46 TP0] KV pool holds 24512 tokens, fewer than --context-length 131072. One full-length"
        " request cannot fit, so long requests will be refused or truncated at serving time.",
    ),
    "Ascend's scheduler preempts": (
        "sizing.kv-too-small",
        "It is slow.\nINFO 06-21 10:12:21 [recompute_scheduler.py:400] [RecomputeScheduler] Preempted request cmpl-1."
        " running_count=7, token_budget=0",
    ),
    "SGLang's audit in sections": (
        "leak.unaccounted",
        "ValueError: pool memory leak detected! [full] total=82482, available=79639, evictable=1438, protected=0,"
        " session_held=0",
    ),
    "SGLang's recurrent pool counts one too many": (
        "corrupt.double-free",
        "ValueError: token_to_kv_pool_allocator memory leak detected! full_available_size=6016, full_evictable_size=4,"
        " self.token_to_kv_pool_allocator.size=6020, self.tree_cache.full_protected_size()=0 mamba_available_size=317,"
        " mamba_evictable_size=138, self.req_to_token_pool.mamba_pool.size=454,"
        " self.tree_cache.mamba_protected_size()=0",
    ),
    "SGLang's profile is negative": (
        "sizing.refused-start",
        "[2026-07-02 07:41:59 TP3] max_total_tokens=4096 is larger than the profiled value -12. Use the profiled value"
        " instead.",
    ),
    "TGI has no memory for its warm-up": (
        "sizing.refused-start",
        "2025-09-26T21:48:00Z ERROR text_generation_launcher: RuntimeError: Not enough memory to handle 2048 prefill"
        " tokens. You need to decrease `--max-batch-prefill-tokens`",
    ),
    "TensorRT-LLM's pool is below a sequence": (
        "sizing.refused-start",
        "[TensorRT-LLM][ERROR] maxTokensInPagedKvCache (1024) must be large enough to process at least 1 sequence to"
        " completion (i.e. must be larger than beam_width (1) * tokensPerBlock (64) * maxBlocksPerSeq (64))",
    ),
    "the error is the title": (
        "sizing.refused-start",
        "[Bug]: ValueError: No available memory for the cache blocks\n\nIt is a card of 16 GB.",
    ),
    "the pooler's warm-up": (
        "sizing.kv-too-large",
        "ERROR 03-16 06:12:38 [core.py:375] RuntimeError: CUDA out of memory occurred when warming up pooler with 256"
        " dummy requests.",
    ),
    "SGLang retracts its only request": (
        "sizing.kv-too-small",
        "[2026-03-06 00:37:19 TP0] AssertionError: No space left for only one request,"
        " self.token_to_kv_pool_allocator.available_size()=0",
    ),
    "V0 has no room to swap": (
        "sizing.kv-too-small",
        "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space to avoid this error.",
    ),
    "a worker of Ray died": (
        "stuck.engine-dead",
        "(EngineCore pid=5) ERROR 06-02 01:41:21 [ray_executor_v2.py:523] RayWorkerProc rank=3 died unexpectedly,"
        " shutting down executor.",
    ),
    "a capture that a device has no memory for": (
        "sizing.kv-too-large",
        '(VllmWorker rank=3 pid=10) ERROR 06-05 06:18:13 [multiproc_executor.py:470]   File "/usr/lib/python3/torch/'
        'cuda/graphs.py", line 84, in capture_end\n'
        "(VllmWorker rank=3 pid=10) ERROR 06-05 06:18:13 [multiproc_executor.py:470] RuntimeError: CUDA error: out of"
        " memory",
    ),
    "a load from the host that raises": (
        "stuck.remote-load",
        "WARNING 11-18 07:48:24 [worker.py:116] Exception in ('CPU', 'GPU') transfer 35: AssertionError()",
    ),
    "the engine's thread for requests": (
        "stuck.front-end",
        "(EngineCore_DP0 pid=9) Exception in thread Thread-1 (process_input_sockets):\n"
        "(EngineCore_DP0 pid=9) Traceback (most recent call last):",
    ),
    "an audit whose sums are on the next line": (
        "corrupt.double-free",
        "ValueError: pool memory leak detected! [full]\n"
        "total=469952, available=96, evictable=470016, protected=0, session_held=0, uncached=0",
    ),
    "a pool that a person compares": (
        "held.pool-reserved",
        "With another library the GPU usage is about 26G, here GPU usage is about 73G. Is this usual?\n"
        "(EngineCore pid=9) INFO 03-08 16:44:29 [gpu_worker.py:456] Available KV cache memory: 47.36 GiB",
    ),
    "TensorRT-LLM's pool and a question": (
        "held.pool-reserved",
        "67GB used for KV cache! Let me know how to control it.\n"
        "[TensorRT-LLM][INFO] Using 132608 tokens in paged KV cache.",
    ),
    "the scheduler's own lines on a fetch": (
        "stuck.remote-load",
        "The decode side hangs.\n"
        "DEBUG 01-13 06:31:31 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.\n"
        "DEBUG 01-13 06:31:41 [scheduler.py:439] cmpl-8 is still in WAITING_FOR_REMOTE_KVS state.\n"
        "DEBUG 01-13 06:32:45 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.",
    ),
    "memory of the host": (
        "held.not-memory",
        "The RSS of the API server keeps growing by 2 GB an hour until the pod is killed. vLLM 0.22, no connector.",
    ),
    "a pool that a person wants smaller": (
        "held.pool-reserved",
        "How can I limit the total GPU memory that the server allocates? A 0.5B model uses 70 GB of memory here.",
    ),
}
WORDS = {
    "workers that outlive their container": (
        "sizing.other-process",
        "After docker rm -f two orphaned worker processes remain alive and hold 22 GB. Only kill -9 frees it.",
    ),
    "memory that a deleted engine keeps": (
        "sizing.other-process",
        "How can I terminate the engine and release the GPU memory? It is not freed even after del llm.",
    ),
    "a request that is preempted in the next step again": (
        "thrash.preemption",
        "A performance regression: the request is resumed, and preempted again in the next step.",
    ),
    "LMCache's store gives a key away that is read": (
        "corrupt.stale-remote-read",
        "[2026-01-27 01:40:09,923] LMCache WARNING: L1Manager: finish read on non-existing key 0x1f, potential"
        " inconsistent data might be read (l1_manager.py:210:lmcache.v1.distributed.l1_manager)",
    ),
    "what is not released after something": (
        "leak.finished-held",
        "The KV cache is not released after requests complete, so token usage does not go down and the server hangs.",
    ),
    "a pool that few requests fill": (
        "sizing.kv-too-small",
        "Why does the KV cache stand at 100% when only two requests are running? What determines the KV cache size?",
    ),
    "wrong output before a table": (
        "corrupt.stale-remote-read",
        "Answers are corrupted behind NIXL.\n| case | output |\n| a stale reference, reused by the store | garbage |",
    ),
    "a host tier that cannot store": (
        "stuck.outer-tier",
        "The prefill side cannot store KV: local CPU memory under pressure (LMCache).",
    ),
    "a Chinese sentence on an idle prefill node": (
        "leak.finished-held",
        "PD分离下，P节点空闲时没有把kv cache释放，kv cache usage一直很高，不会被清零",
    ),
    "a Chinese sentence on requests that wait": ("stuck.never-fits", "请求阻塞在P节点，一直处于waiting状态"),
    "a watchdog in a sentence": (
        "stuck.engine-stalled",
        "After some hours all ranks stop with a watchdog timeout.\nexport SGLANG_DISAGGREGATION_WAITING_TIMEOUT=180",
    ),
    "requests that do not release": (
        "leak.finished-held",
        "Requests do not properly release their KV cache after completing. Token usage nears 1.0 and the server hangs.",
    ),
    "a tier without hits": (
        "collapse.outer-hits",
        "The device's cache can be hit, but none of the memory in ucm is hit (kv_connector: UCMConnector).",
    ),
    "adapters": ("stuck.slots-exhausted", "One LoRA permanently fills the adapter cache and blocks later requests."),
    "a sentence on a failed pull": (
        "stuck.remote-load",
        "The decode instance fails to pull the KV cache from the prefill instance, and the request ends with an error.",
    ),
    "a video that shrinks the pool": (
        "stuck.never-fits",
        "With video input on, a long prompt needs more blocks than the pool has. It just hangs in the queue.",
    ),
    "requests that pend beside an empty pool": (
        "stuck.slots-exhausted",
        "Requests are stuck in pending state although the GPU is free.\n"
        "2024-12-23 18:28:10 - vllm.engine.metrics - INFO - Avg prompt throughput: 0.0 tokens/s, Avg generation"
        " throughput: 45.7 tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 3.1%, CPU"
        " KV cache usage: 0.0%.",
    ),
    "English words in a Chinese sentence": (
        "stuck.self-preempt",
        "KV cache打满100%以后，服务就hang住了，请求被preempt之后不再恢复。",
    ),
    "a full pool and a slow answer in Chinese": ("sizing.kv-too-small", "KV cache usage接近100%时，TPOT激增四五倍。"),
    "a full pool in another order": (
        "sizing.kv-too-small",
        "Hitting close to 100% KV cache kills the throughput, and requests wait.",
    ),
    "the first audit's title": ("leak.unaccounted", "KV cache pool leak detected! It comes after each benchmark."),
    "a tier that is hit too seldom": (
        "collapse.outer-hits",
        "I use --hicache-storage-backend file. The same prompts again after a restart: the hit rate from the file"
        " backend is very low, only 3 %.",
    ),
    "a tier's cache miss": ("collapse.outer-hits", "[Bug]: LMCache has a cache miss for what another server stored"),
    "a tier that stores no more": (
        "stuck.outer-tier",
        "With more prompts it crashes: the offloading connector warns 'Cannot store blocks' first.",
    ),
    "two that compete for the host's memory": (
        "stuck.outer-tier",
        "The server deadlocks under load: loads from the disk tier compete for host memory (LMCache, local_cpu: true).",
    ),
    "a tier that is full and takes the engine with it": (
        "stuck.outer-tier",
        "vLLM crashes when the RAM of the offload tier is full. LMCACHE_MAX_LOCAL_CPU_SIZE=1",
    ),
    "preemptions that free nothing": (
        "thrash.cascade",
        "Under pressure it preempts one request after the other, repeatedly, but their blocks cannot be returned to the"
        " pool in this step, and so it cascades through the whole queue.",
    ),
    "a state in a debug log": (
        "stuck.remote-load",
        "[Bug]: transfer\nDEBUG 01-13 06:31:31 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.",
    ),
    "a request that never fits, though another leak is denied": (
        "stuck.never-fits",
        "This is not a resource leak: the KV cache is empty, but a prompt larger than the pool is stuck in the queue.",
    ),
    "SGLang's checksum of fetched KV": (
        "corrupt.stale-remote-read",
        "[2026-05-24 03:51:46 TP0] KV checksum mismatch req=17 bootstrap_room=17 expected=0x1f got=0x2a",
    ),
    "SGLang's canary": (
        "corrupt.use-after-free",
        "[2026-05-24 03:51:46 TP0] KV cache canary violation detected (kernel_kind=verify, slot_idx=17, position=3)",
    ),
    "Ascend goes on without the KV that it did not load": (
        "corrupt.stale-remote-read",
        "ERROR 06-21 10:12:21 [pool_worker.py:940] KV load failed for hybrid request cmpl-1. Skip invalid-block"
        " fallback to avoid scheduler crash. failed_blocks={17, 18}",
    ),
    "a tier that is not drained": (
        "stuck.remote-load",
        "WARNING 06-21 10:12:21 [manager.py:400] P2PSecondaryTierManager.drain_jobs: still draining after 5s; a stuck"
        " transfer will block the engine.",
    ),
    "LMCache unpins twice": (
        "corrupt.double-free",
        "LMCache WARNING: Pin count of MemoryObj 4096is negative: -1.Double unpin occurred somewhere.",
    ),
    "the memory of the step before": (
        "sizing.other-process",
        "The quantizer's memory was not released before the engine starts, and it reports utilization errors.",
    ),
}
QUIET = {
    "memory that a process left behind is no pool": (
        "held.pool-reserved",
        "Two orphaned VLLM::Worker processes remain alive, holding ~22GB VRAM. What is the KV cache size?",
    ),
    "a cell of a table beside another's": (
        "collapse.outer-hits",
        "Answers are corrupted.\n| case | failed |\n| remote_block_ids out of range | +1 |\n| no reuse | 0 |",
    ),
    "a setting with a time-out": (
        "leak.lease-burst",
        "The schedulers hang.\nexport SGLANG_DISAGGREGATION_WAITING_TIMEOUT=180\nexport PYTHONHASHSEED=0",
    ),
    "a question about the start": (
        "sizing.refused-start",
        "The server takes all of the memory at startup. How much does it need? It is not enough memory for two.",
    ),
    "SGLang's short stamps": (
        "collapse.prefix-hits",
        "It hangs.\n[16:43:29 TP0] Prefill batch. #new-seq: 1, #new-token: 2062, #cached-token: 0, cache hit rate:"
        " 0.00%, token usage: 0.00, #running-req: 0, #queue-req: 0",
    ),
    "an engine that was asked to end": (
        "stuck.engine-dead",
        "INFO 06-02 01:41:20 [launcher.py:80] SIGTERM received, shutting down.\n"
        "ERROR 06-02 01:41:21 [async_llm.py:704] AsyncLLM output_handler failed.\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.",
    ),
    "an engine of 0.32 that was asked to end": (
        "stuck.engine-dead",
        "(APIServer pid=9) INFO 11-29 17:24:31 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
        "(APIServer pid=9) ERROR 11-29 17:24:31 [async_llm.py:906] AsyncLLM output_handler failed.\n"
        "(APIServer pid=9) ERROR 11-29 17:24:31 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError:"
        " EngineCore encountered an issue. See stack trace (above) for the root cause.",
    ),
    "a tier that keeps KV on the host": (
        "held.not-memory",
        "Host memory keeps growing with the offloading connector: blocks that are offloaded are never freed.",
    ),
    "host memory in a command": ("held.not-memory", "docker run --memory 64g vllm-openai. The host has 512 GB RAM."),
    "a container image": (
        "stuck.encoder-budget",
        "services:\n  vllm:\n    image: vllm/vllm-openai\n\nRequests get stuck after an hour.",
    ),
    "a profile that fits": (
        "sizing.refused-start",
        "[2026-07-02 07:41:59 TP3] max_total_tokens=4096 is larger than the profiled value 2048. Use the profiled value"
        " instead.",
    ),
    "pools whose sums are right": (
        "leak.unaccounted",
        "INFO full_available_size=6016, full_evictable_size=4, self.token_to_kv_pool_allocator.size=6020,"
        " mamba_available_size=316, mamba_evictable_size=138, self.req_to_token_pool.mamba_pool.size=454",
    ),
    "an assertion about an option": (
        "corrupt.counter-drift",
        "[TensorRT-LLM][ERROR] Assertion failed: Must set crossKvCacheFraction for encoder-decoder model"
        " (/src/cpp/tensorrt_llm/batch_manager/trtEncoderModel.cpp:88)",
    ),
    "a dump without a hang": (
        "stuck.engine-stalled",
        "The whole server crashes when the tier's RAM is full.\n"
        "ERROR 08-13 08:25:56 [dump_input.py:69] Dumping input data for V1 LLM engine (v0.10.3) with config: model='m'",
    ),
    "an engine that computes": (
        "stuck.engine-stalled",
        "Requests get stuck in the queue.\n"
        "INFO 07-10 10:00:00 metrics.py:10] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 45.7"
        " tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 3.1%, CPU KV cache"
        " usage: 0.0%",
    ),
    "an engine that queues a moment": (
        "stuck.slots-exhausted",
        "How fast is this?\n"
        "INFO 07-10 10:00:00 metrics.py:10] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 45.7"
        " tokens/s, Running: 1 reqs, Swapped: 0 reqs, Pending: 3 reqs, GPU KV cache usage: 3.1%, CPU KV cache"
        " usage: 0.0%",
    ),
    "a store to the host that raises": (
        "stuck.remote-load",
        "WARNING 11-18 07:48:24 [worker.py:116] Exception in ('GPU', 'CPU') transfer 35: AssertionError()",
    ),
    "an engine that was restarted after its thread's end": (
        "stuck.front-end",
        "(EngineCore_DP0 pid=9) Exception in thread Thread-1 (process_input_sockets):\n"
        "INFO 11-20 23:35:01 [api_server.py:1900] vLLM API server version 0.11.0",
    ),
    "an audit that adds up on the next line": (
        "corrupt.double-free",
        "INFO [full]\ntotal=469952, available=96, evictable=469856, protected=0, session_held=0, uncached=0",
    ),
    "an engine that runs out of memory at its start": (
        "stuck.engine-dead",
        "The engine passes the check and then crashes with torch.OutOfMemoryError during graph capture.",
    ),
    "a high hit rate in Chinese": ("collapse.prefix-hits", "命中率很高，但是延迟增加了。"),
    "a scheduler that does not start": (
        "stuck.engine-dead",
        "[2025-11-20 11:10:27 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/sglang/srt/managers/scheduler.py", line 2712, in run_scheduler_process\n'
        "    scheduler = Scheduler(\n",
    ),
    "a replayed graph": (
        "sizing.kv-too-large",
        '  File "/usr/lib/python3/torch/cuda/graphs.py", line 88, in replay\nRuntimeError: CUDA error: an assertion',
    ),
    "a fetch of some seconds": (
        "stuck.remote-load",
        "DEBUG 01-13 06:31:31 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.\n"
        "DEBUG 01-13 06:31:36 [scheduler.py:439] cmpl-7 is still in WAITING_FOR_REMOTE_KVS state.\n"
        "DEBUG 01-13 06:33:40 [scheduler.py:439] cmpl-9 is still in WAITING_FOR_REMOTE_KVS state.",
    ),
    "a leak that is denied": (
        "leak.unaccounted",
        "It slows down. There is no leak: check_memory adds up after an abort.",
    ),
    "a full log": (
        "stuck.outer-tier",
        "It hangs with the offloading connector. CPU is busy. The full log is attached.",
    ),
    "a tier that is hit": (
        "collapse.outer-hits",
        "[Bug]: The title was wrong. The hit rate from the LMCache backend is 93 %, and the latency is low.",
    ),
    "preemptions that free": (
        "thrash.cascade",
        "It preempts requests repeatedly, and each frees its blocks, so that the next one runs.",
    ),
    "the first preemption of a run": (
        "sizing.kv-too-small",
        "WARNING 10-28 11:16:41 scheduler.py:1483] Sequence group 7 is preempted by PreemptionMode.RECOMPUTE mode"
        " because there is not enough KV cache space. total_num_cumulative_preemption=1",
    ),
    "an engine that computes little": (
        "held.not-memory",
        "It hangs.\n"
        "INFO 07-10 10:00:00 metrics.py:10] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0"
        " tokens/s, Running: 54 reqs, Swapped: 0 reqs, Pending: 0 reqs, GPU KV cache usage: 47.4%,"
        " CPU KV cache usage: 0.0%",
    ),
}


def found_in(text: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Each code that doctor gives for the text, with its verdict."""
    report = directory / "report.txt"
    report.write_text(text + "\n")
    main(["doctor", str(report), "--format", "json"])
    return {finding["code"]: finding["verdict"] for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize("name", SHOWN)
def test_an_engine_s_own_line_is_judged(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = SHOWN[name]
    found = found_in(text, tmp_path, capsys)
    if name == "a pool that a person wants smaller":
        assert code in found
    else:
        assert found.get(code) in ("likely", "confirmed"), found


@pytest.mark.parametrize("name", WORDS)
def test_a_sentence_is_a_hypothesis(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = WORDS[name]
    found = found_in(text, tmp_path, capsys)
    assert code in list(found)[:2], found
    assert set(found.values()) == {"cannot-tell"}


@pytest.mark.parametrize("name", QUIET)
def test_what_only_looks_alike_stays_quiet(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = QUIET[name]
    assert code not in found_in(text, tmp_path, capsys)


def test_a_text_that_cannot_tell_is_no_error(tmp_path: Path) -> None:
    """What the tier cannot store costs a later hit. Nothing in these lines says that a request waits."""
    line = "LMCache WARNING: Failed to allocate memory for the KV cache.\nThe KV cache will not be stored.\n"
    log = tmp_path / "a.log"
    log.write_text(3 * line)
    watch = Pipeline()
    watch.feed(read_log(log)[1])
    watch.settle()
    found = [(finding.code, finding.verdict, finding.severity) for finding in watch.findings()]
    assert found == [("stuck.outer-tier", "cannot-tell", "warning")]


def test_a_table_s_spaces_do_not_hide_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        f"INFO 04-06 16:07:{second} [loggers.py:80] Avg   prompt throughput: 0.0 tokens/s, Avg generation throughput:"
        f" 180.0 tokens/s,   Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: {usage}%, Prefix cache hit   rate:"
        " 1.0%"
        for second, usage in (("22", "14.1"), ("32", "14.4"), ("42", "14.7"))
    ]
    assert found_in("An infinite response.\n" + "\n".join(lines), tmp_path, capsys) == {"held.endless-output": "likely"}


def test_a_last_token_of_a_request_that_has_ended_is_no_answer_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        f"INFO 04-06 16:07:{second} [loggers.py:80] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput:"
        f" 180.0 tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 14.1%"
        for second, running in (("22", 1), ("32", 0), ("42", 0))
    ]
    found = found_in("An infinite response.\n" + "\n".join(lines), tmp_path, capsys)
    assert found["held.endless-output"] == "cannot-tell"


@pytest.mark.parametrize(("words", "verdict"), [("", "cannot-tell"), ("KV transfers fail here.\n", "likely")])
def test_a_transfer_of_an_aborted_request_alone_is_no_verdict(
    words: str, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = (
        "[2025-11-05 16:39:09 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='7' with exception"
        " KVTransferError(bootstrap_room=47): Aborted by AbortReq."
    )
    assert found_in(words + line, tmp_path, capsys)["stuck.remote-load"] == verdict


def test_a_failed_load_that_the_engine_makes_up_for_is_information(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.txt"
    report.write_text(
        "WARNING 06-21 10:12:21 [scheduler.py:2600] Recovered from KV load failure: 2 request(s) rescheduled (512"
        " tokens affected).\n"
    )
    main(["doctor", str(report), "--format", "json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(finding["code"], finding["severity"]) for finding in found] == [("stuck.remote-load", "info")]


def test_a_worker_that_died_after_others_waited_for_it_may_have_stood_still(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, died = SHOWN["a worker of Ray died"]
    waits = "INFO 06-02 01:40:20 [shm_broadcast.py:705] No available shared memory broadcast block found in 60 seconds."
    assert found_in(died, tmp_path, capsys) == {"stuck.engine-dead": "likely"}
    assert found_in(f"{waits}\n{died}", tmp_path, capsys) == {
        "stuck.engine-dead": "cannot-tell",
        "stuck.engine-stalled": "cannot-tell",
    }
