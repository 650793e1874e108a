"""Steps, tokens, preemptions and their cost, the memory breakdown, and the engine's configuration."""

from __future__ import annotations

from kvscope.monitor.analysis.memory_breakdown import measured
from kvscope.monitor.events.kinds import Limit, Preempt, Tier, name_of
from kvscope.monitor.exporters.prometheus.metric_families import counter, gauge
from kvscope.monitor.ledger.engine_ledger import EngineLedger

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
        self.info = gauge("engine_info", "1, with the engine's description as labels.", *CONFIGURATION_LABELS)
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
        self.info.add_metric((name, *(str(getattr(ledger.description, field)) for field in CONFIGURATION_LABELS)), 1)
        self.restarts.add_metric((name,), ledger.restarts)
        for code in dict.fromkeys(fault.partition(":")[0] for fault in ledger.description.faults):
            self.faults.add_metric((name, code), 1)
