"""Blocks: by holder, by how long they stay, as they come and go; the prefix cache."""

from __future__ import annotations

from kvscope.monitor.events.kinds import Release, name_of
from kvscope.monitor.exporters.prometheus.metric_families import add_histogram, ages, as_told, counter, gauge, histogram
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.fragmentation import unused_by_all

METRIC_HOLDERS = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")


class PoolFamilies:
    """The families about blocks, being filled."""

    def __init__(self) -> None:
        self.blocks = gauge("blocks", "KV blocks of the pool by who holds them; every block counts once.", "holder")
        self.unexplained = gauge(
            "unexplained_references",
            "References to blocks that no living request and no announced deferral explains.",
        )
        self.difference = gauge(
            "conservation_difference_blocks",
            "Blocks counted under all holders minus the blocks of the pool: 0 if every block counts once. Not exposed"
            " while lost events make the counts uncertain.",
        )
        self.unused = gauge(
            "unused_tokens", "Tokens that the blocks of living requests have room for and that are not computed."
        )
        self.allocated = counter("blocks_allocated", "Blocks handed out.")
        self.released = counter("block_references_released", "References to blocks given back, by reason.", "reason")
        self.evicted = counter("blocks_evicted", "Cached blocks that lost their content.")
        self.cached = counter("blocks_cached", "Blocks whose content entered the prefix cache.")
        self.reused = counter("blocks_reused", "References to blocks that prefix hits took.")
        self.failures = counter("allocation_failures", "Allocations that did not get their blocks.")
        self.age = ages(
            "block_age_seconds",
            "Blocks by how long they have been as they are, to the second: held (in use), or cached_idle. What leaks is"
            " in here and grows old.",
            "state",
        )
        self.lifetime = histogram(
            "block_lifetime_seconds",
            "From when a block was handed out until its content was gone; blocks that are still there are in"
            " kvscope_block_age_seconds.",
        )
        self.idle = histogram(
            "block_idle_before_evict_seconds", "From a cached block's last release until its eviction."
        )
        self.gap = histogram("block_reuse_gap_seconds", "From a cached block's last release until a prefix hit.")
        self.looked_up = counter("prefix_cache_queried_tokens", "Tokens the prefix cache was asked for.")
        self.hit = counter("prefix_cache_hit_tokens", "Tokens the prefix cache had.")

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
                self.age.add_metric((name, label), as_told(now.buckets(now_ns)), now.seconds(now_ns))
        for family, stays in (
            (self.lifetime, residency.lifetime),
            (self.idle, residency.idle_before_evict),
            (self.gap, residency.reuse_gap),
        ):
            add_histogram(family, (name,), stays)
