"""The metrics of an engine: its blocks, its requests, and its work.

Of an engine without an event stream a family has what the last sample says (`add_sampled`). What a sample does not say
is absent, and labels that it cannot tell are empty.
"""

from __future__ import annotations

from collections import Counter
from math import isinf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from ...contract.kinds import FIRST_FINISHED, Limit, Preempt, Release, Status, Tier, name_of
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.ledger_records import unused_by_all
from ...ledger.memory_breakdown import measured
from ...ledger.records import RequestState
from ...ledger.tally import LATENCY_BOUNDS_S, Buckets, Histogram


def gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    """Make a family of current values."""
    return GaugeMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    """Make a family of counts. The page adds `_total` to the name."""
    return CounterMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def histogram(name: str, help: str, *labels: str) -> HistogramMetricFamily:
    """How long what is over took."""
    return HistogramMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def ages(name: str, help: str, *labels: str) -> GaugeHistogramMetricFamily:
    """How old is what goes on now: its buckets fall too, so neither rate() nor increase() is for it."""
    return GaugeHistogramMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], counts: Histogram) -> None:
    """One engine's."""
    family.add_metric(labels, prometheus_buckets(counts.buckets), counts.seconds)


def prometheus_buckets(buckets: Buckets) -> list[tuple[str, float]]:
    """Return the bounds as Prometheus writes them."""
    return [("+Inf" if isinf(bound) else str(bound), count) for bound, count in buckets]


def add_known(family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, ...], value: float | None) -> None:
    """Add a sample unless it is not known."""
    if value is not None:
        family.add_metric(labels, value)


METRIC_HOLDERS = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")


class PoolFamilies:
    """The families about blocks, being filled."""

    def __init__(self) -> None:
        self.usage = gauge(
            "pool_usage_ratio", "Blocks in use as a share of usable blocks. Idle cached blocks are not in use."
        )
        self.blocks = gauge("blocks", "KV blocks of the pool by holder. Every block counts once.", "holder")
        self.unexplained = gauge(
            "unexplained_references",
            "Block references that no live request and no announced deferral explains.",
        )
        self.difference = gauge(
            "conservation_difference_blocks",
            "Blocks counted under all holders minus the pool's blocks: 0 if every block counts once. Absent while"
            " lost events make the counts uncertain.",
        )
        self.unused = gauge("unused_tokens", "Unused token slots in the blocks of live requests.")
        self.allocated = counter("blocks_allocated", "Blocks handed out.")
        self.released = counter("block_references_released", "Released block references, by reason.", "reason")
        self.evicted = counter("blocks_evicted", "Cached blocks whose content was evicted.")
        self.cached = counter("blocks_cached", "Blocks whose content entered the prefix cache.")
        self.reused = counter("blocks_reused", "Block references taken by prefix hits.")
        self.failures = counter("allocation_failures", "Failed allocations.")
        self.age = ages(
            "block_age_seconds",
            "Blocks by their time in the current state, to the second: held (in use) or cached_idle. Leaked blocks"
            " are among them and grow old.",
            "state",
        )
        self.lifetime = histogram(
            "block_lifetime_seconds",
            "The time from a block's allocation until its content was evicted. Blocks still in use are in"
            " kvscope_block_age_seconds.",
        )
        self.idle = histogram(
            "block_idle_before_evict_seconds", "The time from a cached block's last release to its eviction."
        )
        self.gap = histogram("block_reuse_gap_seconds", "The time from a cached block's last release to a prefix hit.")
        self.looked_up = counter("prefix_cache_queried_tokens", "Tokens looked up in the prefix cache.")
        self.hit = counter("prefix_cache_hit_tokens", "Tokens found in the prefix cache.")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's."""
        state, totals, balance = ledger.state, ledger.state.totals, ledger.balance()
        add_known(self.usage, (name,), balance.usage)
        for holder in METRIC_HOLDERS:
            self.blocks.add_metric((name, holder), getattr(balance, holder))
        self.unexplained.add_metric((name,), balance.unexplained_references)
        if not state.damaged:
            self.difference.add_metric((name,), balance.difference)
        if (unused := unused_by_all(state, ledger.description)) is not None:
            self.unused.add_metric((name,), unused)
        self.allocated.add_metric((name,), totals.allocated)
        for release, count in totals.released.items():
            self.released.add_metric((name, name_of(Release, release)), count)
        self.evicted.add_metric((name,), totals.evicted)
        self.cached.add_metric((name,), totals.cached)
        self.reused.add_metric((name,), totals.reused)
        self.failures.add_metric((name,), totals.allocation_failures)
        self.looked_up.add_metric((name,), totals.looked_up_tokens)
        self.hit.add_metric((name,), totals.hit_tokens)
        residency = ledger.tally.residency
        if ledger.tally.in_step:
            now_ns = state.now_ns
            for label, now in (("held", residency.held), ("cached_idle", residency.idle)):
                self.age.add_metric((name, label), prometheus_buckets(now.buckets(now_ns)), now.seconds(now_ns))
        for family, samples in (
            (self.lifetime, residency.lifetime),
            (self.idle, residency.idle_before_evict),
            (self.gap, residency.reuse_gap),
        ):
            add_histogram(family, (name,), samples)

    def add_sampled(self, name: str, _ledger: EngineLedger, sample: Sample) -> None:
        """One engine's, without a stream."""
        add_known(self.usage, (name,), sample.usage)
        add_known(self.looked_up, (name,), sample.prefix_queries)
        add_known(self.hit, (name,), sample.prefix_hits)


class RequestFamilies:
    """The families about requests, being filled."""

    def __init__(self) -> None:
        self.requests = gauge(
            "requests",
            "Requests by state and reason. Finished ones count only while they hold blocks.",
            "state",
            "reason",
        )
        self.stalled = gauge(
            "requests_stalled",
            "Requests without progress according to the engine's own watchdog, and without progress in the ledger"
            " since.",
        )
        self.waiting = ages("request_waiting_seconds", "Requests not yet admitted, by the time since their arrival.")
        self.queue = histogram(
            "request_queue_time_seconds",
            "The time from arrival to first admission of requests that ended, or to their end if they were never"
            " admitted.",
            "outcome",
        )
        self.first_token = histogram(
            "request_time_to_first_token_seconds",
            "The time from arrival at the scheduler to the first token of requests that ended.",
            "outcome",
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "The average time between two output tokens of each request that ended.",
            "outcome",
        )
        self.arrived = counter("requests_arrived", "Requests that reached the scheduler.")
        self.finished = counter("requests_finished", "Requests that ended, by their terminal status.", "status")
        self.client_gone = counter("clients_gone", "Requests whose client closed the connection.")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's. O(requests)."""
        totals = ledger.state.totals
        by_state: Counter[tuple[int, str]] = Counter({(Status.RUNNING, ""): 0, (Status.WAITING, ""): 0})
        stalled, waiting = 0, Histogram(LATENCY_BOUNDS_S)
        for record in ledger.state.requests.values():
            by_state[record.status, _waiting_reason(ledger, record)] += 1
            stalled += bool(record.stalled_ns)
            if record.is_waiting and not record.admitted_ns:
                waiting.observe([round(ledger.age_s(record.arrived_ns) * 1e9)])
        for (status, reason), count in by_state.items():
            self.requests.add_metric((name, name_of(Status, status), reason), count)
        self.stalled.add_metric((name,), stalled)
        self.waiting.add_metric((name,), prometheus_buckets(waiting.buckets), waiting.seconds)
        for outcome, latencies in (("served", ledger.tally.served), ("failed", ledger.tally.failed)):
            add_histogram(self.queue, (name, outcome), latencies.queue)
            add_histogram(self.first_token, (name, outcome), latencies.first_token)
            add_histogram(self.per_token, (name, outcome), latencies.per_token)
        self.arrived.add_metric((name,), totals.arrived)
        for terminal in Status:
            if terminal >= FIRST_FINISHED:
                self.finished.add_metric((name, terminal.name), totals.finished.get(terminal, 0))
        self.client_gone.add_metric((name,), totals.client_gone)

    def add_sampled(self, name: str, _ledger: EngineLedger, sample: Sample) -> None:
        """One engine's, without a stream."""
        add_known(self.requests, (name, "RUNNING", ""), sample.running)
        if sample.waiting is not None:
            deferred = sample.deferred or 0
            self.requests.add_metric((name, "WAITING", ""), sample.waiting - deferred)
            if sample.deferred is not None:
                self.requests.add_metric((name, "WAITING", _DEFERRED), deferred)


_DEFERRED = "DEFERRED"
"""The reason of requests that wait for something other than room, as vLLM's own page counts them."""


def _waiting_reason(ledger: EngineLedger, record: RequestState) -> str:
    if record.is_running and not record.cause:
        return ""
    if record.is_finished:
        return "FREE_DEFERRED" if record.number in ledger.state.deferrals else "UNACCOUNTED"
    cause = ledger.cause_of_wait(record)
    return cause.name if cause else ""


SUGGESTIONS = ("fit_requested", "use_all")
"""Advice in a MEMORY event, which is no part of the device."""
CONFIGURATION_LABELS = (
    "model",
    "version",
    "block_size",
    "num_gpu_blocks",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "scheduling_policy",
    "kv_connector",
)


class WorkFamilies:
    """The families about what the engine does, being filled."""

    def __init__(self) -> None:
        self.steps = counter("steps", "Completed steps, by the limit of each.", "limit")
        self.step_seconds = counter("step_seconds", "Time spent in steps.")
        self.computed = counter("computed_tokens", "Tokens computed.")
        self.output = counter("output_tokens", "Tokens generated.")
        self.preemptions = counter("preemptions", "Preemptions, counted when they happen, by reason.", "reason")
        self.tokens_lost = counter(
            "preempted_tokens", "Computed tokens lost to preemption, by reason, since kvscope attached.", "reason"
        )
        self.recomputed = counter(
            "recomputed_tokens",
            "Recomputed tokens since kvscope attached: after a PREEMPTION, or of prompts that were CACHED (a lower"
            " bound).",
            "reason",
        )
        self.memory = gauge(
            "memory_bytes",
            "The memory breakdown as the engine measured it. Parts that it did not report are absent.",
            "part",
        )
        self.suggested = gauge("memory_suggested_kv_bytes", "The pool size that the engine suggests.", "suggestion")
        self.tier_used = gauge("tier_blocks", "Blocks stored in an outer tier of KV storage.", "tier")
        self.tier_capacity = gauge("tier_capacity_blocks", "Blocks that an outer tier can hold.", "tier")
        self.info = gauge("engine_info", "1, with the engine's description as labels.", "signal", *CONFIGURATION_LABELS)
        self.restarts = counter("engine_restarts", "Restarts of the engine seen by this service.")
        self.faults = gauge("engine_fault_on", "1 for each fault that was enabled by hand.", "code")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's."""
        state, totals, recompute = ledger.state, ledger.state.totals, ledger.tally.recompute
        for limit in Limit:
            self.steps.add_metric((name, limit.name), totals.limits.get(limit, 0))
        self.step_seconds.add_metric((name,), totals.step_ns / 1e9)
        self.computed.add_metric((name,), totals.computed_tokens)
        self.output.add_metric((name,), totals.output_tokens)
        for why in Preempt:
            self.preemptions.add_metric((name, why.name), totals.preemptions.get(why, 0))
            self.tokens_lost.add_metric((name, why.name), recompute.lost.get(why, 0))
        self.recomputed.add_metric((name, "PREEMPTION"), recompute.after_preemption)
        self.recomputed.add_metric((name, "CACHED"), recompute.though_cached)
        for part, size in measured(state.memory).items():
            if part in SUGGESTIONS:
                self.suggested.add_metric((name, part), size)
            else:
                self.memory.add_metric((name, part), size)
        for tier, held in state.tiers.items():
            self.tier_used.add_metric((name, name_of(Tier, tier)), held.used)
            self.tier_capacity.add_metric((name, name_of(Tier, tier)), held.capacity)
        described = (str(getattr(ledger.description, field)) for field in CONFIGURATION_LABELS)
        self.info.add_metric((name, "stream", *described), 1)
        self.restarts.add_metric((name,), ledger.restarts)
        for code in dict.fromkeys(fault.partition(":")[0] for fault in ledger.description.faults):
            self.faults.add_metric((name, code), 1)

    def add_sampled(self, name: str, ledger: EngineLedger, sample: Sample) -> None:
        """One engine's, without a stream."""
        add_known(self.steps, (name, ""), sample.steps)
        add_known(self.output, (name,), sample.generation_tokens)
        add_known(self.preemptions, (name, ""), sample.preemptions)
        facts = ledger.facts
        described = (str(facts[field].value) if field in facts else "" for field in CONFIGURATION_LABELS)
        self.info.add_metric((name, "metrics", *described), 1)
        self.restarts.add_metric((name,), ledger.restarts)
