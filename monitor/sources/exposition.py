"""The series that engines expose on a metrics page, and how the values of one time become a sample.

FIELDS and DURATIONS name the series, of vLLM with kvscope's own engine and of SGLang, and the field that each becomes.
A field may have had several names: whichever a page has is taken. What neither table has of an engine is not exposed.

Facts (an engine's pool, as it reports it) come from the labels of vllm:cache_config_info. On models with several kinds
of layers block_size is the smallest of them, so that blocks times block_size is not the pool's size in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from ..base.text import number_in
from ..contract.samples import DurationCount, Fact, Sample

FIELDS: Final[dict[str, str]] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_requests_waiting_by_reason": "deferred",  # since 0.20
    "vllm:kv_cache_usage_perc": "usage",  # since 0.9
    "vllm:gpu_cache_usage_perc": "usage",  # before 0.12
    "vllm:engine_sleep_state": "awake",
    "vllm:iteration_tokens_total_count": "steps",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "finished",  # of the reasons that are an end (stop, length); "aborted" of the others
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:request_prompt_tokens_count": "measured_requests",
    "vllm:request_prompt_tokens_sum": "request_prompt_tokens",
    "vllm:request_generation_tokens_sum": "request_output_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",  # since 0.12, as the hits; prefix_hit_rate is from these two
    "vllm:gpu_prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:gpu_prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:num_requests_kv_fetch_by_stage": "fetching",  # since 0.32, on an engine that fetches
    "vllm:nixl_num_failed_transfers_total": "failed_transfers",  # in 0.32 with the notifications that failed
    "vllm:nixl_num_failed_notifications_total": "failed_transfers",
    "vllm:hf3fs_num_failed_load_total": "failed_transfers",
    "vllm:kv_offload_tiering_promotion_job_failures_total": "failed_transfers",
    "vllm:mooncake_num_failed_transfers_total": "failed_transfers",  # since 0.33
    "vllm:mooncake_num_failed_recvs_total": "failed_transfers",
    "vllm:umbp_transfer_failed_total": "failed_transfers",
    "vllm:nixl_num_kv_expired_reqs_total": "expired_leases",
    "vllm:mooncake_num_kv_expired_reqs_total": "expired_leases",
    "vllm:nixl_num_notifications_after_expiry_total": "late_reads",
    "vllm:kv_offload_allocation_failure_total": "tier_refusals",
    "vllm:kv_offload_tiering_promotion_allocation_failures_total": "tier_refusals",
    "vllm:kv_offload_store_bytes_total": "tier_stored_bytes",
    "vllm:kv_offload_load_bytes_total": "tier_loaded_bytes",
    "kvscope_engine_steps_total": "steps",
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "waiting",
    "sglang:token_usage": "usage",  # the highest of these three
    "sglang:full_token_usage": "kv_pool_usage",
    "sglang:swa_token_usage": "window_pool_usage",
    "sglang:mamba_usage": "state_pool_usage",
    "sglang:num_retracted_requests_total": "preemptions",
    "sglang:num_requests_total": "finished",
    "sglang:num_aborted_requests_total": "aborted",
    "sglang:prompt_tokens_total": "prompt_tokens",
    "sglang:generation_tokens_total": "generation_tokens",
    "sglang:cache_hit_rate": "prefix_hit_rate",
    "sglang:num_decode_transfer_queue_reqs": "fetching",
    "sglang:num_transfer_failed_reqs_total": "failed_transfers",
    "sglang:num_bootstrap_failed_reqs_total": "failed_transfers",
}
"""In comments, the first release of vLLM seen with a name, or without it."""
COUNTERS: Final = (
    "steps",
    "preemptions",
    "finished",
    "aborted",
    "prompt_tokens",
    "generation_tokens",
    "prefix_queries",
    "prefix_hits",
    "external_queries",
    "external_hits",
    "failed_transfers",
    "expired_leases",
    "late_reads",
    "tier_refusals",
    "tier_stored_bytes",
    "tier_loaded_bytes",
)
DURATIONS: Final[dict[str, str]] = {
    "vllm:time_to_first_token_seconds_bucket": "first_token_s",
    "vllm:request_queue_time_seconds_bucket": "queue_s",
    "sglang:time_to_first_token_seconds_bucket": "first_token_s",
    "sglang:queue_time_seconds_bucket": "queue_s",
}
"""Histograms, by the name of their buckets."""
MAX_BUCKETS: Final = 256
SUMMED: Final = ("finished", "aborted")
NOT_AN_END: Final = ("abort", "error")
"""Values of vLLM's finished_reason that are no answer to its end: a client that left, a time-out, a failure."""
LABELLED: Final = {"deferred": "deferred", "awake": "awake", "fetching": "in_progress"}
"""Fields that are one of their metric's series, of vLLM: the one with a label of this value."""
PROCESS_CPU: Final = "process_cpu_seconds_total"
"""Of the process that serves the page, whatever engines are behind it: it has no label of one. There is none with
several API servers (prometheus_client's multiprocess mode). Of SGLang it is not used: without steps no stall is judged.
"""
CONFIGURATION: Final = "vllm:cache_config_info"
CONFIGURATION_FACTS: Final[dict[str, str]] = {
    "num_gpu_blocks": "num_gpu_blocks",
    "block_size": "block_size",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "kv_cache_size_tokens": "kv_cache_size_tokens",
    "kv_cache_max_concurrency": "max_concurrency",
    "enable_prefix_caching": "enable_prefix_caching",
}
"""Labels of CONFIGURATION, and the facts' names, which are the log's."""
NONE_KNOWN: Final = (
    "it has no metric of an engine that is known (vllm:num_requests_running, sglang:num_running_reqs). vLLM exposes"
    " none with --disable-log-stats, SGLang only with --enable-metrics"
)
NONE_VALID: Final = (
    "its metrics have values that no engine has: NaN, negative, a usage above 1, or a count above 2^53. Look whether a"
    " proxy or an exporter rewrites the page"
)
ExposedFigures = dict[str, float]
ExposedBuckets = dict[str, dict[float, float]]
"""By the fields of DURATIONS: for each upper bound in seconds, how many requests took at most as long."""


class ExposedEngine(NamedTuple):
    """Whose figures they are. `instance` is HOST:PORT, `rank` vLLM's `engine` or SGLang's `dp_rank`."""

    model: str
    instance: str
    rank: str

    def __str__(self) -> str:
        return f"{self.model}@{self.instance}/{self.rank}"


def engine_of(labels: Mapping[str, str], instance: str) -> ExposedEngine:
    """Return the engine that a series with these labels is of."""
    return ExposedEngine(
        labels.get("model_name", "engine"), instance, labels.get("engine") or labels.get("dp_rank") or "0"
    )


MAX_FIGURE: Final = float(1 << 53)
"""The largest count that a float holds exactly."""
POOLS: Final = ("kv_pool_usage", "window_pool_usage", "state_pool_usage")
SHARES: Final = frozenset({"usage", "prefix_hit_rate", *POOLS})
WHOLE: Final = frozenset(FIELDS.values()) - SHARES - {"awake"}
"""Fields of a sample that are counts, and take the figure as it is."""


def put_figure(figures: ExposedFigures, name: str, labels: Mapping[str, str], value: float) -> None:
    """Take one series' value in, if it is of a field. A value that is no count and no share was not exposed."""
    field = FIELDS.get(name)
    if field is None or not 0 <= value <= (1 if field in SHARES else MAX_FIGURE):
        return
    if name.startswith("vllm:") and LABELLED.get(field, "") not in ("", *labels.values()):
        return
    if field == "finished" and labels.get("finished_reason") in NOT_AN_END:
        field = "aborted"
    # One series for each reason adds up; tensor-parallel ranks, and one metric's two names, repeat the same value.
    figures[field] = figures.get(field, 0.0) + value if field in SUMMED else max(figures.get(field, value), value)


def put_process_cpu(figures: ExposedFigures, cpu_s: float | None) -> None:
    """Enter the CPU time of the server into the values of an engine behind it, if it was exposed."""
    if cpu_s is not None and 0 <= cpu_s <= MAX_FIGURE:
        figures["process_cpu_s"] = cpu_s


def put_bucket(buckets: ExposedBuckets, name: str, labels: Mapping[str, str], value: float) -> None:
    """Take one series' value in, if it is a bucket of DURATIONS. Other ranks than the first repeat what it counts."""
    field = DURATIONS.get(name)
    if field is None or not 0 <= value <= MAX_FIGURE or labels.get("tp_rank", "0") not in ("", "0"):
        return
    try:
        bound = float(labels.get("le", ""))
    except ValueError:
        return
    counts = buckets.setdefault(field, {})
    if bound >= 0 and (bound in counts or len(counts) < MAX_BUCKETS):
        counts[bound] = counts.get(bound, 0.0) + value


def durations_between(before: Mapping[float, float], now: Mapping[float, float]) -> tuple[DurationCount, ...] | None:
    """Return the requests that a histogram has counted since `before`, or None if the two are not of one histogram."""
    if before.keys() != now.keys() or math.inf not in now:
        return None
    counts: list[DurationCount] = []
    lower, below = 0.0, 0.0
    for upper in sorted(now):
        until = now[upper] - before[upper]
        if until < below:
            return None
        if until > below:
            counts.append((lower, upper, round(until - below)))
        lower, below = upper, until
    return tuple(counts)


def dialect_of(names: Iterable[str]) -> str:
    """Return the engine that has metrics of these names: kvscope, vllm or sglang."""
    prefixes = {name.partition(":")[0] for name in names}
    if any(prefix.startswith("kvscope_engine_") for prefix in prefixes):
        return "kvscope"
    return "sglang" if "sglang" in prefixes else "vllm"


def facts_of(engine: ExposedEngine, position: str, dialect: str, configuration: Mapping[str, str]) -> Iterator[Fact]:
    """Yield the engine's facts about itself. `configuration` are the labels of CONFIGURATION, empty if it has none."""
    yield Fact(str(engine), position, "exposition", dialect)
    yield Fact(str(engine), position, "model", engine.model)
    for label, name in CONFIGURATION_FACTS.items():
        if (text := configuration.get(label, "None")) not in ("None", ""):
            yield Fact(str(engine), position, name, number_in(text))


class Sampler:
    """Makes samples of one engine's figures, one moment after the other: rates from counters, restarts noticed."""

    def __init__(self, engine: ExposedEngine, source: str) -> None:
        self.engine = str(engine)
        self.source = source
        self._before: ExposedFigures = {}
        self._buckets_before: ExposedBuckets = {}
        self._before_ns = 0

    def sample(
        self, at_ns: int, position: str, figures: ExposedFigures, buckets: ExposedBuckets | None = None
    ) -> Sample:
        """Return the values as a sample. A counter that was lower than before began again from 0."""
        before, counted = self._before, buckets or {}
        restarted = any(figures[name] < before[name] for name in COUNTERS if name in figures and name in before)
        seconds = (at_ns - self._before_ns) / 1e9 if self._before_ns else 0.0

        def rate(name: str) -> float | None:
            if name not in figures or (name not in before and not restarted):
                return None
            return (figures[name] - (0.0 if restarted else before[name])) / seconds if seconds > 0 else None

        def durations(name: str) -> tuple[DurationCount, ...] | None:
            now = counted.get(name, {})
            return durations_between(dict.fromkeys(now, 0.0) if restarted else self._buckets_before.get(name, {}), now)

        hit_rate = figures.get("prefix_hit_rate")
        if figures.get("prefix_queries"):
            hit_rate = figures.get("prefix_hits", 0.0) / figures["prefix_queries"]
        named: dict[str, Any] = {name: round(value) for name, value in figures.items() if name in WHOLE}
        named |= {name: figures[name] for name in POOLS if name in figures}
        sample = Sample(
            engine=self.engine,
            position=position,
            at_ns=at_ns,
            usage=figures.get("usage"),
            prompt_tokens_per_s=rate("prompt_tokens"),
            generation_tokens_per_s=rate("generation_tokens"),
            prefix_hit_rate=hit_rate,
            awake=bool(figures["awake"]) if "awake" in figures else None,
            process_cpu_s=figures.get("process_cpu_s"),
            restarted=restarted,
            source=self.source,
            first_token_s=durations("first_token_s"),
            queue_s=durations("queue_s"),
            **named,
        )
        self._before, self._before_ns, self._buckets_before = figures, at_ns, counted
        return sample
