"""The engine's own figures: what Prometheus scrapes, and the line that the log has every ten seconds.

Metrics and line are vLLM's wherever the meaning is equal, so that readers of one engine can read the other. The rest is
named kvscope_engine_*.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ..core.engine_core import EngineCore
from ..core.intake import BucketCounts
from .text_stream import OPENAI_FINISH_REASONS

logger = logging.getLogger(__name__)

STATISTICS: Final = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "From one token of a request to its next.",
    "request_time_per_output_token_seconds": "The mean time from token to token of a request.",
    "e2e_request_latency_seconds": "From arrival to the end.",
    "request_queue_time_seconds": "From arrival to the first admission.",
    "request_inference_time_seconds": "From the first admission to the last token.",
    "request_prefill_time_seconds": "From the first admission to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Tokens generated for a request.",
    "request_max_num_generation_tokens": "The most tokens generated for one output of a request.",
    "request_params_max_tokens": "The max_tokens that requests set.",
    "request_num_preemptions": "Preemptions of a request.",
    "iteration_tokens_total": "Tokens of prompts computed, and tokens sampled, in a step.",
}
"""The meaning of each histogram, by its name in vLLM without the prefix. Aborted requests are not counted, as there."""


class EngineCollector:
    """A prometheus_client collector over `core`, read when asked. Requests and blocks never become labels."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._labels = {"model_name": core.config.served_model_name, "engine": "0"}

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        core = self.core
        scheduler, counts, log = core.scheduler, core.counts, core.log
        yield self._gauge("vllm:num_requests_running", "Requests that are running.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait to run.", scheduler.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the pool that is referenced, 0 to 1.", core.usage)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of computed prompts.", counts.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens generated.", counts.generation_tokens)
        yield self._counter("vllm:num_preemptions", "Preemptions, when they happen.", scheduler.num_preemptions)
        yield self._counter("vllm:prefix_cache_queries", "Tokens looked for in the cache.", scheduler.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Tokens found in the cache.", scheduler.prefix_hits)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by how.", labels=[*self._labels, "finished_reason"]
        )
        for status, reason in OPENAI_FINISH_REASONS.items():
            success.add_metric([*self._labels.values(), reason], counts.finished[status])
        yield success
        yield self._waiting_by_reason()
        for histogram_name, histogram in core.statistics.histograms.items():
            yield self._histogram(histogram_name, histogram)
        yield self._cache_config()
        yield self._counter("kvscope_engine_steps", "Steps launched.", scheduler.step)
        yield self._counter("kvscope_engine_passes", "Passes over the queues, step or none.", scheduler.passes)
        yield self._blocks()
        yield self._gauge(
            "kvscope_engine_deferred_frees", "Finished requests that keep their blocks.", len(scheduler.deferred)
        )
        yield self._gauge("kvscope_engine_front_end_requests", "Requests not yet answered in full.", core.in_flight)
        yield self._gauge(
            "kvscope_engine_stalled_requests", "Requests without progress for long.", len(core.watchdog.stalled)
        )
        yield self._gauge(
            "kvscope_engine_stalled_seconds",
            "Time without progress, or 0 if it is short.",
            core.watchdog.engine_stalled_s,
        )
        yield self._counter("kvscope_engine_dropped_events", "Events the stream had no room for.", log.dropped_events)
        faults = GaugeMetricFamily(
            "kvscope_engine_fault", "1 for each fault that is on, by name.", labels=[*self._labels, "fault"]
        )
        for fault in core.faults.on.values():
            faults.add_metric([*self._labels.values(), str(fault)], 1)
        yield faults

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _waiting_by_reason(self) -> GaugeMetricFamily:
        """Return vLLM's two gauges: capacity, and waits for anything but room. Their sum is all that wait."""
        scheduler = self.core.scheduler
        waiting, deferred = scheduler.num_waiting, len(scheduler.parked)
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Requests that wait for room (capacity), or for a grammar or KV from elsewhere (deferred).",
            labels=[*self._labels, "reason"],
        )
        for reason, count in (("capacity", max(0, waiting - deferred)), ("deferred", deferred)):
            family.add_metric([*self._labels.values(), reason], count)
        return family

    def _histogram(self, name: str, histogram: BucketCounts) -> HistogramMetricFamily:
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        cumulative = accumulate(histogram.counts)
        family = HistogramMetricFamily(f"vllm:{name}", STATISTICS[name], labels=list(self._labels))
        family.add_metric(list(self._labels.values()), list(zip(bounds, cumulative, strict=True)), histogram.total)
        return family

    def _cache_config(self) -> GaugeMetricFamily:
        config, core = self.core.config, self.core
        facts = {
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(core.pool.total),
            "enable_prefix_caching": str(config.enable_prefix_caching),
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the pool is made.", labels=["engine", *facts])
        family.add_metric(["0", *facts.values()], 1)
        return family

    def _blocks(self) -> GaugeMetricFamily:
        free, cached_idle, used, total = self.core.pool.counts()
        by_state = {"free": free - cached_idle, "cached_idle": cached_idle, "used": used, "total": total}
        family = GaugeMetricFamily(
            "kvscope_engine_blocks", "KV blocks as the pool counts them.", labels=[*self._labels, "state"]
        )
        for state, count in by_state.items():
            family.add_metric([*self._labels.values(), state], count)
        return family


class StatsLine:
    """vLLM's stats line. It is left out while nothing moves and nothing waits, after one such line."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._before = (core.clock.monotonic_ns(), 0, 0)
        self._was_quiet = True

    def log(self) -> None:
        """Log the activity since last time."""
        core = self.core
        scheduler, counts = core.scheduler, core.counts
        then, prompt_before, generated_before = self._before
        now = core.clock.monotonic_ns()
        self._before = now, counts.prompt_tokens, counts.generation_tokens
        prompt, generated = counts.prompt_tokens - prompt_before, counts.generation_tokens - generated_before
        is_quiet = not (prompt or generated or scheduler.has_work)
        if is_quiet and self._was_quiet:
            return
        self._was_quiet = is_quiet
        seconds = max((now - then) / 1e9, 1e-9)
        hits = scheduler.prefix_hits / scheduler.prefix_queries if scheduler.prefix_queries else 0.0
        logger.info(
            "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, %s KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            prompt / seconds,
            generated / seconds,
            len(scheduler.running),
            scheduler.num_waiting,
            core.config.device.partition(":")[0].replace("cuda", "gpu").upper(),
            100 * core.usage,
            100 * hits,
        )
