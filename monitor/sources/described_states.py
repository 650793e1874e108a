"""States of an engine that are not in vLLM's statistics line: SGLang's batch lines, lists in prose, pasted metrics.

form                 example
-------------------  --------------------------------------------------------------------------------------
SGLang's batch line  "Decode batch, #running-req: 4, token usage: 0.97, gen throughput (token/s): 429.3, #queue-req: 3"
a list               "Running: 0 reqs, Waiting: 5-6 reqs, GPU KV cache usage: 0.0%", on one line or several
a metric             "vllm:kv_cache_usage_perc{engine="3"} -0.38", "sglang:num_queue_reqs was 0"
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

StateReading = dict[str, float]

_COUNT: Final = r"(\d{1,9})"
BATCH_LINE: Final = re.compile(r"\b(Prefill|Decode) batch\b")
_BATCH_FIELDS: Final = {
    "running": re.compile(rf"#running-req: {_COUNT}", re.ASCII),
    "waiting": re.compile(rf"#queue-req: {_COUNT}", re.ASCII),
    "usage": re.compile(r"(?<!swa )token usage: (\d(?:\.\d{1,4})?)", re.ASCII),
    "generation_tokens_per_s": re.compile(r"gen throughput \(token/s\): (\d{1,9}(?:\.\d{1,4})?)", re.ASCII),
}
_NEW_SEQUENCES: Final = re.compile(rf"#new-seq: {_COUNT}", re.ASCII)

_LIST_FIELDS: Final = {
    "running": re.compile(rf"\bRunning(?: requests| reqs)?\W{{1,3}}{_COUNT}(?:-\d{{1,9}})?(?: reqs?)?\b", re.ASCII),
    "waiting": re.compile(
        rf"\b(?:Waiting|Pending)(?: requests| reqs)?\W{{1,3}}{_COUNT}(?:-\d{{1,9}})?(?: reqs?)?\b", re.ASCII
    ),
    "usage": re.compile(r"KV cache usage\W{1,3}(\d{1,3}(?:\.\d{1,3})?) ?%", re.ASCII),
    "generation_tokens_per_s": re.compile(
        r"(?:generation |gen |\b)throughput\W{1,3}(\d{1,9}(?:\.\d{1,3})?) ?tok", re.ASCII | re.IGNORECASE
    ),
}
KEPT_METRICS: Final = {
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
    "vllm:kv_cache_usage_perc": "usage",
    "vllm:gpu_cache_usage_perc": "usage",
    "sglang:token_usage": "usage",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:gpu_prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_queries": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:gpu_prefix_cache_hits_total": "prefix_hits",
    "vllm:prefix_cache_hits": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:num_preemptions_total": "preemptions",
    "sglang:num_retracted_requests_total": "preemptions",
}
"""Metrics that a report is judged by, and what each is called here."""
METRIC: Final = re.compile(
    r"\b((?:vllm|sglang|lmcache):[a-z_]{3,80})[`*]?(?:\{([^{}]{0,600})\})?[`*]?"
    r" {0,6}(?:was|is|=|:|->|stays at|shows|at)? {0,6}(-?\d{1,18}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?)(?![\w:])",
    re.ASCII | re.IGNORECASE,
)
_LABEL: Final = re.compile(r'(\w{1,60})="([^"]{0,200})"')


class MetricReading(NamedTuple):
    """One series of a pasted metrics page: its name, labels and value."""

    metric: str
    labels: dict[str, str]
    value: float


def batch_state(text: str) -> StateReading | None:
    """Return the state in a batch line of SGLang. `usage` is a share of the pool, 0 to 1. None if it is no such
    line.
    """
    kind = BATCH_LINE.search(text)
    if kind is None:
        return None
    state = _read(_BATCH_FIELDS, text[kind.start() :])
    if "running" not in state:
        return None
    if (new := _NEW_SEQUENCES.search(text)) is not None:
        state["running"] += int(new[1])
    return state


def listed_state(text: str) -> StateReading:
    """Return the engine's state in a line of prose, empty if none. `usage` is a share of the pool."""
    state = _read(_LIST_FIELDS, text)
    if "usage" in state:
        state["usage"] = round(state["usage"] / 100, 5)
    return state


def metric_readings(text: str) -> Iterator[MetricReading]:
    """Yield the series in a line, as a metrics page prints them or as a sentence names them."""
    if "vllm:" in text or "sglang:" in text or "lmcache:" in text:
        for name, labels, value in METRIC.findall(text):
            yield MetricReading(name, dict(_LABEL.findall(labels)), float(value))


def _read(expressions: dict[str, re.Pattern[str]], text: str) -> StateReading:
    found = ((name, expression.search(text)) for name, expression in expressions.items())
    return {name: float(match[1]) for name, match in found if match is not None}
