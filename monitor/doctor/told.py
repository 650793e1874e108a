"""What a file without an engine's figures says all the same, in words: its memory bill, and a load's demand."""

from __future__ import annotations

from collections.abc import Sequence

from monitor.events.sample import Fact
from monitor.ledger.bill import GIB, NoBill, bill_of, fit_requested, over_requested, parts
from monitor.ledger.demand import capacity_tokens, demands, tokens_per_request
from monitor.ledger.words import percent


def in_words(facts: Sequence[Fact]) -> list[str]:
    """A sentence for each; empty if there is nothing that sums can be done with."""
    return [*_bill(facts), *_demand(facts)]


def _bill(facts: Sequence[Fact]) -> list[str]:
    try:
        bill, _ = bill_of(facts)
    except NoBill:
        return []
    said = ", ".join(f"{size / GIB:.2f} {name}" for name, size in parts(bill).items())
    over, fits = over_requested(bill), fit_requested(bill).kv_cache_memory
    words = f"it has a memory bill: of {bill.device_total / GIB:.2f} GiB, {said}"
    if over is not None and over > 0:
        words += f"; that is {over / GIB:.2f} GiB more than it was given, and --kv-cache-memory={fits} would fit"
    return [f"{words} (monitor explain memory --log FILE does the sums)"]


def _demand(facts: Sequence[Fact]) -> list[str]:
    named = {fact.name: fact for fact in facts}
    asked = demands(named)
    if not asked:
        return []
    each = ", ".join(f"{d.clients} x {tokens_per_request(named):,} = {d.tokens:,} ({percent(d.share)})" for d in asked)
    return [f"the pool holds {capacity_tokens(named):,} tokens, and the load asks for {each}"]
