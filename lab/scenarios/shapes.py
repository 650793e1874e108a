"""Engines, and clients, that incidents of several families have."""

from __future__ import annotations

from typing import Final

from ..client_load import Clients

SMALL: Final = {"num_gpu_blocks_override": 101, "max_num_seqs": 8, "max_num_batched_tokens": 256}
MEDIUM: Final = {"num_gpu_blocks_override": 401, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
FINE: Final = {
    "num_gpu_blocks_override": 601,
    "block_size": 4,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "scheduling_policy": "priority",
}
TIGHT: Final = {"num_gpu_blocks_override": 41, "max_num_seqs": 16, "max_num_batched_tokens": 128}
TIGHT_FINE: Final = {**FINE, "num_gpu_blocks_override": 161}
HOST: Final = {"kv_connector": "host"}
AHEAD: Final = {"async_scheduling": True}
NO_PREFIXES: Final = {"enable_prefix_caching": False}
PRIORITY: Final = {"scheduling_policy": "priority"}

CHAT: Final = Clients(rate=0.6, until_s=15)
BUSY: Final = Clients("b", rate=2, until_s=15)
URGENT: Final = Clients("u", rate=0.6, until_s=15, priority=(0, 3))
LEAVING: Final = Clients("l", rate=1, until_s=15, leave=0.6)
STRUCTURED: Final = Clients("g", rate=0.4, until_s=15, regex="[ab]{9}")
# More beginnings than the pool keeps: again and again one is fetched from the host.
FETCHED: Final = Clients("f", rate=3, until_s=15, prompt=(10, 30), output=(5, 15), prefixes=12, prefix=320)
FETCHED_POOL: Final = {**HOST, "num_gpu_blocks_override": 161, "max_num_seqs": 8, "max_num_batched_tokens": 512}
FETCHED_FINE: Final = {**FETCHED_POOL, "block_size": 8, "num_gpu_blocks_override": 221, "max_num_seqs": 4}
FETCHED_URGENT: Final = {**FETCHED_POOL, **PRIORITY}
GONE: Final = Clients(
    "gone", rate=2, since_s=6, until_s=16, prompt=(10, 30), prefixes=12, prefix=320, leave_fetching=True
)
GROWING: Final = (Clients(at_once=10, prompt=(15, 30), output=(60, 90), until_s=20),)
