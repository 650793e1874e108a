"""Blocks: by holder, by residency, as they come and go. The prefix cache."""

from __future__ import annotations

from kvscope.monitor.events.kinds import Release, name_of
from kvscope.monitor.exporters.prometheus.metric_families import (
    add_histogram,
    ages,
    counter,
    gauge,
    histogram,
    prometheus_buckets,
)
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.fragmentation import unused_by_all

METRIC_HOLDERS = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")


class PoolFamilies:
    """The families about blocks, being filled."""

    def __init__(self) -> None:
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
