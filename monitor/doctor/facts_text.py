"""Describes a memory breakdown and a load's demand in a file, and KV events, where there is no balance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscope.monitor.analysis.demand import capacity_tokens, demands, tokens_per_request
from kvscope.monitor.analysis.memory_breakdown import (
    GIB_B,
    NoBreakdown,
    breakdown_of,
    fit_requested,
    over_requested,
    parts,
)
from kvscope.monitor.events.samples import Fact
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, percent


def facts_in_words(facts: Sequence[Fact]) -> list[str]:
    """Return a sentence for each, or nothing if the facts allow no sums."""
    return [*_breakdown_in_words(facts), *_demand_in_words(facts)]


def _breakdown_in_words(facts: Sequence[Fact]) -> list[str]:
    try:
        breakdown, _ = breakdown_of(facts)
    except NoBreakdown:
        return []
    sizes = ", ".join(f"{size / GIB_B:.2f} {name}" for name, size in parts(breakdown).items())
    over, fits = over_requested(breakdown), fit_requested(breakdown).kv_cache_memory
    words = f"it has a memory breakdown: of {breakdown.device_total / GIB_B:.2f} GiB, {sizes}"
    if over is not None and over > 0:
        words += f"; that is {over / GIB_B:.2f} GiB more than it was given, and --kv-cache-memory={fits} would fit"
    return [f"{words} (monitor explain memory --log FILE does the sums)"]


def _demand_in_words(facts: Sequence[Fact]) -> list[str]:
    named = {fact.name: fact for fact in facts}
    asked = demands(named)
    if not asked:
        return []
    each = ", ".join(f"{d.clients} x {tokens_per_request(named):,} = {d.tokens:,} ({percent(d.share)})" for d in asked)
    return [f"the pool holds {capacity_tokens(named):,} tokens, and the load asks for {each}"]


def kv_events_in_words(ledgers: Iterable[EngineLedger]) -> list[str]:
    """Return a sentence for each engine, and one on the limits of KV events."""
    lines = [
        f"{ledger.engine} keeps {counted(kept.kept_blocks, 'block')} for their prefixes, by the KV events received:"
        f" {kept.stored:,} stored, {kept.removed:,} removed, cleared {counted(kept.cleared, 'time')}"
        for ledger, kept in ((ledger, ledger.prefixes) for ledger in ledgers)
    ]
    return [
        *lines,
        "KV events do not show usage, running or waiting requests, block owners, hits or preemptions: give its /metrics"
        " page or its log too",
    ]
