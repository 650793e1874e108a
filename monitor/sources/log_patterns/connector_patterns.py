"""KV connectors, disaggregated serving and outer tiers: NIXL, Mooncake, LMCache, SGLang's own."""

from __future__ import annotations

import re
from typing import Final

from .pattern import LineFields, LogPattern

_COUNTED: Final = {
    "failed": re.compile(r"\bNum failed (?:transfers|recvs)=(\d{1,9})\b", re.ASCII),
    "expired": re.compile(r"\bNum KV expired reqs=(\d{1,9})\b", re.ASCII),
    "late": re.compile(r"\bNum notifs after expiry=(\d{1,9})\b", re.ASCII),
    "refused": re.compile(r"\bvllm:kv_offload_allocation_failure=(\d{1,9})\b", re.ASCII),
    "stores": re.compile(r"\bvllm:kv_offload_cpu_allocation_size_count=(\d{1,9})\b", re.ASCII),
}
"""Events of one interval in a connector's line of statistics, by field."""


def transfer_counts(match: re.Match[str]) -> LineFields:
    """Return how many transfers failed, leases expired, and reads were notified after their lease; how many stores in
    an outer tier there were, and how many it refused.
    """
    return {name: sum(map(int, pattern.findall(match[0]))) for name, pattern in _COUNTED.items()}


CONNECTOR_PATTERNS: Final = (
    LogPattern(
        "free_delayed",
        "vllm",
        "Mooncake and Ascend connectors, 0.9 to 0.30",
        "Delaying free of",
        r"Delaying free of (?P<blocks>\d{1,9}) blocks for request",
        "INFO 08:30:23 [mooncake_connector.py:1910] Delaying free of 181 blocks for request chatcmpl-1",
    ),
    LogPattern(
        "lease_expired",
        "vllm",
        "NIXL connector, 0.10 to 0.33",
        "Releasing expired KV blocks",
        r"Releasing expired KV blocks for request\s{1,12}\S{1,120} which were retrieved by (?P<readers>\d{1,6})"
        r" (?:decode|remote)(?:.{0,40}?within (?P<seconds>\d{1,6}) seconds)?",
        "WARNING 11-19 10:12:21 [nixl_connector.py:1180] Releasing expired KV blocks for request chatcmpl-1 which were"
        " retrieved by 0 decode worker(s) within 480 seconds.",
    ),
    LogPattern(
        "lease_expired",
        "vllm",
        "Mooncake connector, 0.12 to 0.33",
        "without being sent",
        r"Request \S{1,120} timed out after (?P<seconds>\d{1,6}) seconds without being sent",
        "WARNING 02-11 10:12:21 [mooncake_connector.py:910] Request chatcmpl-1 timed out after 480 seconds without"
        " being sent. Freeing its blocks on the producer side.",
    ),
    LogPattern(
        "lease_expired",
        "vllm",
        "Mooncake connector of vllm-ascend, 0.11 to 0.18",
        "Force freed expired request",
        r"Force freed expired request: \S{1,120}(?:.{0,80}?\((?P<seconds>\d{1,6}) seconds\))?",
        "ERROR 11-19 10:12:21 [mooncake_connector.py:233] Force freed expired request: chatcmpl-1. Reason: Request"
        " exceeded timeout threshold (480 seconds).",
    ),
    LogPattern(
        "lease_expired",
        "vllm",
        "NIXL and Mooncake connectors, 0.20 to 0.33",
        "expired ",
        r"Declining expired remote read for|Request \S{1,120} expired before sending on P side",
        "WARNING 06-21 10:12:21 [pull_worker.py:154] Declining expired remote read for cmpl-1 from engine 7f3a.",
    ),
    LogPattern(
        "lease_expired",
        "vllm",
        "MoRIIO connector, 0.20 to 0.33",
        "deferred sends",
        r"Reaped \d{1,9} deferred sends with no finished_sending notification after (?P<seconds>\d{1,6})s",
        "WARNING 06-21 10:12:21 [moriio_connector.py:1582] Reaped 2 deferred sends with no finished_sending"
        " notification after 60s. This indicates lost async KV completion notifications from the KV connector.",
    ),
    LogPattern(
        "stale_read",
        "vllm",
        "NIXL push connector, 0.20 to 0.33",
        "notif (may have expired)",
        r"Unrecognized request \S{1,120} notif \(may have expired\)",
        "ERROR 06-21 10:12:21 [push_worker.py:790] Unrecognized request cmpl-1 notif (may have expired).",
    ),
    LogPattern(
        "stale_read",
        "vllm",
        "NIXL connector, 0.10 to 0.33",
        "Potentially invalid KV blocks",
        r"Potentially invalid KV blocks for unrecognized request",
        "ERROR 11-19 10:12:21 [nixl_connector.py:1068] Potentially invalid KV blocks for unrecognized request"
        " chatcmpl-1"
        " were retrieved by a decode worker. They may have expired.",
    ),
    LogPattern(
        "transfer_counts",
        "vllm",
        "NIXL, Mooncake and offloading connectors, 0.11 to 0.33",
        "KV Transfer metrics: ",
        r"KV Transfer metrics: (?:Num successful transfers=|vllm:kv_offload_).{0,900}",
        "INFO 11-20 10:00:00 [metrics.py:100] KV Transfer metrics: Num successful transfers=3, Avg xfer time (ms)=5.0,"
        " P90 xfer time (ms)=9000.0, Num failed transfers=12, Num KV expired reqs=7, Num notifs after expiry=4",
        transfer_counts,
    ),
    LogPattern(
        "transfer_failed",
        "vllm",
        "0.9 to 0.33",
        "ail|Mooncake sender thread",
        r"(?:NIXL transfer (?:setup )?fail(?:ed|ure)|(?P<recovered>Recovered from )?KV (?:cache )?(?:transfer|load)"
        r" fail(?:ed|ure)(?! for hybrid request)|Failed to (?:transfer|receive|load|pull|send|read|fetch)"
        r" (?:the )?KV|Failed to get (?:kv_?cache from (?:the )?prefill|(?:\d{1,9} )?Mooncake (?:keys|sub-batch)"
        r"|\d{1,9} keys out of)|Failed to load blocks\. failed_count"
        r"|Mooncake transfer (?:engine )?(?:returned |failed)|[Hh]andshake (?:with \S{1,120} failed|failed for)"
        r"|pulling kv_caches for .{1,120} failed"
        r"|Sending to \S{1,120} failed \(ret=|Error in Mooncake sender thread|RDMA transfer failed for request"
        r"|[Ww]rite task failed for request|hybrid READ failed|External linker load failed"
        r"|MembPull (?:batch read|send task) failed|LayerwiseConnector transfer fail\b|block_id=\S{1,80} load failed"
        r"|Receive failed after all retries|batch_transfer_sync_read failed|addr for request fail\.)",
        "ERROR 11-19 10:12:21 [scheduler.py:1600] Failing 1 request(s) due to KV load failure",
    ),
    LogPattern(
        "transfer_failed",
        "vllm",
        "LMCache's, Mooncake's and Ascend's connectors, 0.9 to 0.33",
        "retrieve|Mooncake xfer|remote|SENDING_MSG|SendingThread|READ_FAILED|receive ACK",
        r"processing the retrieve request for|retrieved tokens is less than the expected number of tokens"
        r"|Error processing Mooncake xfer request|req \S{1,120}: (?:KV group count mismatch|local blocks\(\d)"
        r"|Got FAILED_SENDING_MSG|Failed to receive ACK for request|P received READ_FAILED"
        r"|KVCacheSendingThread encountered exception",
        "ERROR 06-21 10:12:21 [vllm_v1_adapter.py:930] The number of retrieved tokens is less than the expected number"
        " of tokens! This should not happen!",
    ),
    LogPattern(
        "kv_incomplete",
        "vllm",
        "vllm-ascend, 0.11 to 0.20",
        "Skip invalid-block|skipped in batch_copy|invalid gva|MembPull|reformat KV",
        r"KV load failed for hybrid request \S{1,120} Skip invalid-block fallback"
        r"|these blocks will be skipped in batch_copy|build_shared skipping \d{1,9} blocks with invalid gva"
        r"|MembPull _do_read: layer \S{1,120} not in|Failed to reformat KV cache after all pulls",
        "WARNING 06-21 10:12:21 [kv_transfer.py:300] [KVPOOL] build_shared skipping 3 blocks with invalid gva (gva<=0)",
    ),
    LogPattern(
        "kv_incomplete",
        "sglang",
        "0.5",
        "KV checksum mismatch|only the first|truncating to common",
        r"KV checksum mismatch"
        r"|metadata buffers but this prefill has \d{1,9}; only the first|State index length mismatch for",
        "[2026-05-24 03:51:46 TP0] KV checksum mismatch req=17 bootstrap_room=17 expected=0x1f got=0x2a",
    ),
    LogPattern(
        "transfer_failed",
        "lmcache",
        "0.3 to 0.5",
        "failed to load|Bypassing|can't be retrieved|unhealthy|timed out|NIXL|scatter retrieved",
        r"Request \S{1,120} failed to load \d{1,12} tokens across|The cache block is in the storage, but it can't be"
        r"|Bidirectional NIXL cache probe failed|NIXL read failed in worker thread|Failed to scatter retrieved"
        r"|(?P<recovered>Bypassing LMCache for request|LMCache server is unhealthy"
        r"|(?:LOOKUP|QUERY_PREFETCH_STATUS) to \S{1,200} timed out)",
        "LMCache WARNING: Request cmpl-1 failed to load 256 tokens across 16 blocks",
    ),
    LogPattern(
        "kv_incomplete",
        "lmcache",
        "0.4 to 0.5",
        "potential inconsistent data|may be overwritten while",
        r"potential inconsistent data might be (?:read|written)|its KV blocks may be overwritten while the server",
        "LMCache WARNING: L1Manager: finish read on non-existing key k, potential inconsistent data might be read",
    ),
    LogPattern(
        "transfer_failed",
        "vllm",
        "offloading connector, 0.11 to 0.12",
        "'GPU') transfer",
        r"Exception in \('\w{1,20}', 'GPU'\) transfer \d{1,12}",
        "WARNING 11-18 07:48:24 [worker.py:116] Exception in ('CPU', 'GPU') transfer 235: AssertionError()",
    ),
    LogPattern(
        "transfer_failed",
        "sglang",
        "0.4.5 to 0.5",
        "transfer failed for request",
        r"(?:Prefill|Decode) transfer failed for request(?:.{0,400}?: Aborted by (?P<aborted_by>\w{1,20}))?",
        "[2025-09-01 10:00:00 TP0] Decode transfer failed for request rank=0 decode_req.req.rid='1'",
    ),
    LogPattern(
        "transfer_failed",
        "sglang",
        "0.4.5 to 0.5",
        "failed for request",
        r"(?:Prefill bootstrap|Decode handshake) failed for request(?:.{0,400}?: Aborted by (?P<aborted_by>\w{1,20}))?",
        "[2025-08-31 07:26:45 TP0] Prefill bootstrap failed for request rank=0 req.rid='1' req.bootstrap_room=7",
    ),
    LogPattern(
        "transfer_failed",
        "sglang",
        "0.5",
        "bootstrap|for room|retrieve|staging ring|load_back failed|load batch failed",
        r"Lost connection with prefill instance|(?:Mori transfer (?:submission|worker)|Unexpected transfer worker error"
        r"|NIXL transport error)(?: failed)? for room|PD rebootstrap prefill (?:request )?failed for rid"
        r"|LMCache retrieve failed after admission|Prefill instance failed to register to bootstrap server"
        r"|prefill bootstrap_thread died|HiCache load_back failed for rid|layer-wise load batch failed"
        r"|\[FlexKV\] retrieve_kv: task \d{1,12} failed|[Ss]taging\] a chunk (?:does not fit|exceeds) the staging ring",
        "[2026-05-24 03:51:46 TP0] Lost connection with prefill instance (bootstrap_addr: 10.0.0.7:8998), 12 requests"
        " affected",
    ),
    LogPattern(
        "transfer_timed_out",
        "sglang",
        "0.5",
        "transfer done signal",
        r"[Ss]ome requests fail to receive KV Cache transfer done signal",
        "[2025-08-31 07:32:08 TP6] Some requests fail to receive KV Cache transfer done signal after bootstrapping. If"
        " a greater mean TTFT is acceptable, you can 'export SGLANG_DISAGGREGATION_WAITING_TIMEOUT=600'",
    ),
    LogPattern(
        "transfer_timed_out",
        "sglang",
        "0.4.5 to 0.5",
        "out when bootstrapping",
        r"[Ss]ome requests timed? out when bootstrapping",
        "[2025-08-31 07:32:08 TP6] Some requests timed out when bootstrapping, which means prefill instances fail to"
        " receive the KV indices from the decode instance of this request.",
    ),
    LogPattern(
        "transfer_timed_out",
        "vllm",
        "NIXL push connector, 0.20 to 0.33",
        "without a push completion",
        r"registration for request \S{1,120} timed out after (?P<seconds>[\d.]{1,9})s without a push completion",
        "WARNING 06-21 10:12:21 [push_worker.py:300] NixlPushConnector: registration for request cmpl-1 timed out"
        " after 480.0s without a push completion",
    ),
    LogPattern(
        "transfer_timed_out",
        "sglang",
        "0.4.5 to 0.5",
        "timed out after",
        r"Request \S{1,80} timed out after (?P<seconds>[\d.]{1,9})s in KVPoll\.(?P<state>\w{1,30})",
        "[2025-09-01 10:00:00 TP0] Request 17 timed out after 300.0s in KVPoll.WaitingForInput",
    ),
    LogPattern(
        "transfer_timed_out",
        "vllm",
        "Mooncake and MoRIIO connectors, tiers of other engines, 0.20 to 0.33",
        "P side ready|TIMED OUT|expired after|transfer_timeout|sending abort",
        r"Timeout waiting for P side ready|RDMA read TIMED OUT for req \S{1,120} after (?P<seconds>[\d.]{1,9})s"
        r"|Deferred write task for request \S{1,120} expired after"
        r"|Timed out waiting for (?:write|load)_ready_flag|READ send queue stayed full past transfer_timeout"
        r"|round=\d{1,9} timed out, sending abort",
        "ERROR 06-21 10:12:21 [moriio_connector.py:1901] RDMA read TIMED OUT for req cmpl-1 after 30.0s"
        " (kv_connector_extra_config.recv_abort_timeout=30)",
    ),
    LogPattern(
        "transfer_timed_out",
        "sglang",
        "0.5",
        "ack from prefill",
        r"Deferred KV release for room \S{1,40} timed out after (?P<seconds>[\d.]{1,9})s without a full drain",
        "[2026-05-24 03:51:46 TP0] Deferred KV release for room 17 timed out after 30.0s without a full drain ack from"
        " prefill; releasing anyway.",
    ),
    LogPattern(
        "transfer_timed_out",
        "sglang",
        "0.5",
        "all-ranks Success",
        r"room=\S{1,40} not complete (?P<seconds>\d{1,9})s after all-ranks Success",
        "[2026-05-24 03:51:46 TP0] [STAGING] room=17 not complete 60s after all-ranks Success (never arrived)",
    ),
    LogPattern(
        "tier_drains",
        "vllm",
        "offloading connector, 0.30 to 0.33",
        "still draining after",
        r"drain_jobs: still draining after (?P<seconds>\d{1,6})s",
        "WARNING 06-21 10:12:21 [manager.py:400] P2PSecondaryTierManager.drain_jobs: still draining after 5s; a stuck"
        " transfer will block the engine.",
    ),
    LogPattern(
        "tier_refuses",
        "vllm",
        "offloading and Mooncake store connectors, 0.20 to 0.33",
        "cannot store chunks|NO_AVAILABLE_HANDLE",
        r"Request \S{1,120} cannot store chunks|offloading pressure \(NO_AVAILABLE_HANDLE\); skipping future",
        "WARNING 06-21 10:12:21 [scheduler.py:1739] Request cmpl-1: cannot store chunks",
    ),
    LogPattern(
        "remote_wait",
        "vllm",
        "0.9 to 0.33, at DEBUG",
        "WAITING_FOR_REMOTE_KVS state",
        r"(?P<request>\S{1,120}) is still in WAITING_FOR_REMOTE_KVS state",
        "DEBUG 03-13 06:31:31 [scheduler.py:439] cmpl-1 is still in WAITING_FOR_REMOTE_KVS state.",
    ),
    LogPattern(
        "tier_has_no_candidates",
        "lmcache",
        "0.3",
        "No eviction candidates",
        r"No eviction candidates found in (?P<tier>[\w ]{1,40}?) backend",
        "LMCache WARNING: No eviction candidates found in local cpu backend.",
    ),
    LogPattern(
        "pin_expired",
        "lmcache",
        "0.3 to 0.5",
        "Pin timeout detected",
        r"Pin timeout detected for MemoryObj \S{1,40} Pin count: (?P<pins>\d{1,9}), Elapsed time:"
        r" (?P<seconds>\d{1,9}(?:\.\d{1,6})?)s",
        "LMCache WARNING: Pin timeout detected for MemoryObj 4096. Pin count: 1, Elapsed time: 301.50s. Forcing unpin"
        " to 0.",
    ),
    LogPattern(
        "pin_expired",
        "lmcache",
        "0.3 to 0.5",
        "Force unpinned",
        r"Force unpinned (?P<expired>\d{1,9}) timeout objects in (?P<pinned>\d{1,9}) pinned_objects"
        r"(?: within (?P<seconds>\d{1,9}) seconds)?",
        "LMCache WARNING: Force unpinned 3 timeout objects in 8 pinned_objects within 300 seconds",
    ),
    LogPattern(
        "unpinned_twice",
        "lmcache",
        "0.2 to 0.5",
        "Double unpin|Double free",
        r"MemoryObj .{1,120}Double (?:unpin|free) occurred",
        "LMCache WARNING: Pin count of MemoryObj 4096is negative: -1.Double unpin occurred somewhere.",
    ),
    LogPattern(
        "tier_refuses",
        "lmcache",
        "0.3 to 0.5",
        "memory under pressure",
        r"(?P<tier>[Ll]ocal cpu|CPU) memory under pressure so choosing to (?:not store|store only)",
        "LMCache WARNING: Local cpu memory under pressure so choosing to not store the KV cache.",
    ),
    LogPattern(
        "tier_state",
        "lmcache",
        "0.3",
        "pinned_count=",
        r"(?:[\w ]{1,40} backend state: )?total_items=(?P<items>\d{1,9}), pinned_count=(?P<pinned>\d{1,9})",
        "LMCache WARNING: Local CPU backend state: total_items=18, pinned_count=18, ref_count_distribution={1: 18}.",
    ),
    LogPattern(
        "tier_lookup",
        "lmcache",
        "0.2 to 0.3",
        "LMCache hit tokens",
        r"Total tokens (?P<tokens>\d{1,12}), LMCache hit tokens: (?P<hits>\d{1,12})",
        "LMCache INFO: Reqid: cmpl-1, Total tokens 8211, LMCache hit tokens: 0, need to load: 0",
    ),
    LogPattern(
        "tier_stored",
        "lmcache",
        "0.2 to 0.3",
        " out of total ",
        r"Stored (?P<stored>\d{1,12}) out of total (?P<tokens>\d{1,12}) tokens",
        "LMCache INFO: Stored 8192 out of total 8192 tokens. size: 1.0000 gb, cost 100.1 ms",
    ),
    LogPattern(
        "tier_allocation_failed",
        "lmcache",
        "0.2 to 0.5",
        "allocate memory|batched allocate",
        r"(?:Failed to allocate memory|No space to allocate memory|Unable to allocate memory)"
        r" (?:block|object|obj|for|during)|Failed to batched allocate \d{1,9} memory blocks",
        "LMCache WARNING: Failed to allocate memory block of size 33554432 because no memory is available",
    ),
    LogPattern(
        "connector_named",
        "vllm",
        "0.8 to 0.33",
        "kv_connector",
        r"kv_connector['\"]?\s{0,2}[=:]\s{0,2}['\"](?P<connector>\w{1,80})",
        '--kv-transfer-config \'{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}\'',
    ),
)
