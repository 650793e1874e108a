"""Describes a memory breakdown and a load's demand in a file, and KV events, where there is no balance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvscope.monitor.analysis.demand import capacity_tokens, demands, tokens_per_request
from kvscope.monitor.analysis.memory_breakdown import (
    GIB_B,
    NoBill,
    bill_of,
    fit_requested,
    over_requested,
    parts,
)
from kvscope.monitor.events.samples import Fact
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, percent


def facts_in_words(facts: Sequence[Fact]) -> list[str]:
    """Return a sentence for each, or nothing if the facts allow no sums."""
    return [*_bill_in_words(facts), *_demand_in_words(facts)]


def _bill_in_words(facts: Sequence[Fact]) -> list[str]:
    try:
        bill, _ = bill_of(facts)
    except NoBill:
        return []
    said = ", ".join(f"{size / GIB_B:.2f} {name}" for name, size in parts(bill).items())
    over, fits = over_requested(bill), fit_requested(bill).kv_cache_memory
    words = f"it has a memory bill: of {bill.device_total / GIB_B:.2f} GiB, {said}"
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
    told = [
        f"{ledger.engine} keeps {counted(books.kept_blocks, 'block')} for their prefixes, as far as was heard:"
        f" {books.stored:,} stored, {books.removed:,} removed, cleared {counted(books.cleared, 'time')}"
        for ledger, books in ((ledger, ledger.prefixes) for ledger in ledgers)
    ]
    return [
        *told,
        "KV events do not tell usage, what runs or waits, who holds a block, hits or preemptions: give its /metrics"
        " page or its log too",
    ]
