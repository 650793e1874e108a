"""Advice in SGLang's words: its flags and metrics for those of vLLM, which rules and runbooks name.

Every judgement about SGLang passes here, so a rule need not know of an engine other than the one it was learned from.
What has no counterpart is left out: a flag that an engine does not have is worse advice than none.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from .judgement import Judgement

_Said = TypeVar("_Said", bound=Judgement)

IN_SGLANG: Final = {
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--kv-cache-memory-bytes": "--max-total-tokens",
    "--max-num-seqs": "--max-running-requests",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--kv-cache-dtype fp8": "--kv-cache-dtype fp8_e5m2",
    "--enforce-eager": "--disable-cuda-graph",
    "--block-size": "--page-size",
    "--scheduling-policy": "--schedule-policy",
    "--no-enable-prefix-caching": "--disable-radix-cache",
    "--api-server-count": "--tokenizer-worker-num",
    "vllm:num_preemptions_total": "sglang:num_retracted_requests_total",
    "vllm:prefix_cache_hits_total": "sglang:cached_tokens_total",
    "vllm:prefix_cache_queries_total": "sglang:prompt_tokens_total",
    "vllm:prompt_tokens_total": "sglang:prompt_tokens_total",
    "vllm:generation_tokens_total": "sglang:generation_tokens_total",
    "vllm:num_requests_waiting": "sglang:num_queue_reqs",
    "vllm:num_requests_running": "sglang:num_running_reqs",
    "vllm:kv_cache_usage_perc": "sglang:token_usage",
    "vllm:gpu_cache_usage_perc": "sglang:token_usage",
}
"""vLLM's names, and SGLang's for the same end."""
_NAME: Final = re.compile(
    r"(?<![\w-])(?:" + "|".join(sorted(map(re.escape, IN_SGLANG), key=len, reverse=True)) + r")(?![\w-])"
)
_BOTH: Final = re.compile(
    r"(?:--[\w-]+|vllm:\w+) \(SGLang: (?P<instead>[^;()]+)\)"
    r"|\((?:vLLM: [^;()]+; )?SGLang: (?P<own>[^;()]+)(?:; vLLM: [^;()]+)?\)"
    r"| \(vLLM: [^;()]+\)|, no --num-gpu-blocks-override|vllm:num_requests_waiting_by_reason, or "
)
"""`--max-num-seqs (SGLang: --max-running-requests)`, both names in parentheses, and a way of several that is vLLM's."""
ONLY_VLLM: Final = re.compile(
    r"\bvLLM\b|\bVLLM_\w+|\bvllm:\w+|--(?:num-gpu-blocks|swap-space|kv-transfer|kv-connector|kv-lease|kv-offloading"
    r"|async-scheduling|no-async-scheduling|no-enforce-eager|scheduler-reserve|watermark|mm-processor|limit-mm"
    r"|structured-outputs|disable-hybrid-kv|mamba-cache-dtype|max-cudagraph|compilation-config|enable-prefix-caching)"
    r"|--(?:mem-fraction-static|max-total-tokens|chunked-prefill-size) \d"
    r"|\bevent streams?\b|\bmonitor record\b|[Aa]ttach the probe\b|tcp://HOST:5757|\b(?:a|its) probe\b"
)
"""What SGLang has nothing for: vLLM's variables, metrics and flags, values that its flags do not share, a probe."""
_SENTENCE_END: Final = re.compile(r"(?<=\.) (?=[A-Z])")
_STREAM: Final = re.compile(
    r"(?:attach )?the event stream(?: of a probe(?: on [^;,.]+)?)?(?: \(monitor doctor tcp://HOST:5757\))?|\ba probe\b"
)
SGLANG_LOG: Final = "SGLang's log of that time (kvscope has no probe for SGLang)"
_ADVICE: Final = ("do_now", "change", "wont_help")


def in_sglang(judged: _Said) -> _Said:
    """Return a judgement whose advice has SGLang's names, without what SGLang lacks."""
    return msgspec.structs.replace(
        judged,
        missing=sglang_text(_STREAM.sub(SGLANG_LOG, judged.missing)),
        **{field: tuple(filter(None, map(sglang_text, getattr(judged, field)))) for field in _ADVICE},
    )


def sglang_text(text: str) -> str:
    """Return a text with SGLang's names, without the sentences that only hold for vLLM."""
    text = _BOTH.sub(lambda both: both["instead"] or (f"({both['own']})" if both["own"] else ""), text)
    text = _NAME.sub(lambda name: IN_SGLANG[name[0]], text)
    return " ".join(sentence for sentence in _SENTENCE_END.split(text) if ONLY_VLLM.search(sentence) is None)
