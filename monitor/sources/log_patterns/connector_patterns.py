"""KV connectors, disaggregated serving and outer tiers: NIXL, Mooncake, LMCache, SGLang's own."""

from __future__ import annotations

import re
from typing import Final

from .pattern import LineFields, LogPattern

_COUNTED: Final = {
    "failed": re.compile(r"\bNum failed (?:transfers|recvs)=(\d{1,9})\b", re.ASCII),
    "expired": re.compile(r"\bNum KV expired reqs=(\d{1,9})\b", re.ASCII),
    "late": re.compile(r"\bNum notifs after expiry=(\d{1,9})\b", re.ASCII),
}
"""Events of one interval in a connector's line of statistics, by field."""


def transfer_counts(match: re.Match[str]) -> LineFields:
    """Return how many transfers failed, leases expired, and reads were notified after their lease."""
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
        "NIXL and Mooncake connectors, 0.11 to 0.33",
        "KV Transfer metrics: ",
        r"KV Transfer metrics: Num successful transfers=.{0,900}",
        "INFO 11-20 10:00:00 [metrics.py:100] KV Transfer metrics: Num successful transfers=3, Avg xfer time (ms)=5.0,"
        " P90 xfer time (ms)=9000.0, Num failed transfers=12, Num KV expired reqs=7, Num notifs after expiry=4",
        transfer_counts,
    ),
    LogPattern(
        "transfer_failed",
        "vllm",
        "0.9 to 0.33",
        "ail",
        r"(?:NIXL transfer (?:setup )?fail(?:ed|ure)|KV (?:cache )?(?:transfer|load) fail(?:ed|ure)"
        r"|Failed to (?:transfer|receive|load|pull|send|read|fetch)"
        r" (?:the )?KV|Failed to get kv_?cache from (?:the )?prefill"
        r"|Mooncake transfer (?:engine )?(?:returned |failed)|Handshake with \S{1,120} failed"
        r"|pulling kv_caches for .{1,120} failed)",
        "ERROR 11-19 10:12:21 [scheduler.py:1600] Failing 1 request(s) due to KV load failure",
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
        "Double unpin",
        r"Double unpin occurred",
        "LMCache WARNING: Pin count of MemoryObj 4096is negative: -1.Double unpin occurred somewhere.",
    ),
    LogPattern(
        "tier_refuses",
        "lmcache",
        "0.3 to 0.5",
        "memory under pressure",
        r"(?P<tier>[Ll]ocal cpu|CPU) memory under pressure so choosing to not store",
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
        "0.2 to 0.3",
        "allocate memory",
        r"(?:Failed to allocate memory|No space to allocate memory|Unable to allocate memory) (?:block|object|obj|for)",
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
