"""leak.external-pins: blocks stay pinned though no request needs them, and cannot be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from ...base.text import counted, duration, percent
from ...contract.kinds import Tier, TierOp, name_of
from ...contract.wire import PINS
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import TierState
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import outside_wait_limit
from ..judgement import Alternative, Evidence, Judgement, Unless, seen
from .deferred_blocks import connector_text, received_for_s

PINS_NEEDED: Final = "whether the pins are still needed: the connector's own record of them"


def _tier_effect(tier: TierState, *, full: bool) -> str:
    if full:
        return f"The tier is full ({tier.used:,} blocks), so it cannot reuse the pinned blocks."
    return f"The tier uses {tier.used:,} of {tier.capacity:,} blocks. Once it is full, it can store that much less."


class ExternalPins(StreamDetector[Judgement]):
    """Pins that are older than every fetch that still goes on.

    Sees: pins of an outer tier that outlast every fetch, or blocks of the pool to which something other than a request,
    such as a connector, keeps adding references that it never drops.
    Confirmed when: pins hold a tenth of a tier for the pending period, and no fetch that goes on is as old as they are.
    Likely when: they are pins of the pool: the stream does not show whether the connector still needs them.
    Not when: a fetch that needs its pins goes on (stuck.remote-load); blocks of the pool were pinned once or twice, as
    those of a system prompt may be.
    """

    code = "leak.external-pins"
    severity = "warning"
    title = "Pinned blocks are never unpinned"

    oldest_s = Threshold(
        10,
        "s",
        "a pin lasts as long as a fetch, milliseconds to seconds. While the fetch is in progress it may be older",
    )
    min_share = Threshold(0.1, "of the tier", "a tier that lacks less than this serves nearly as well as a whole one")
    min_times = Threshold(
        3, "times", "pins of the pool that are taken once or twice may be meant to stay, as those of a system prompt"
    )
    alternatives = (
        Unless("pins that are still needed", "no request is being fetched from that tier"),
        Alternative("pins of usual length", "the age of the oldest pin"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the pins of the pool, and of each tier, that outlived what they were for."""
        if ledger.state.pinned:
            yield from self._pool_pins(ledger, settings)
        for number, tier in ledger.state.tiers.items():
            if tier.pins:
                yield from self._old_pins(ledger, settings, name_of(Tier, number), tier)

    def _pool_pins(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        state, at = ledger.state, ledger.at
        pins = ledger.outside_waits.pins
        overdue = set()
        for since_ns in set(state.pinned.values()):
            limit = outside_wait_limit(ledger, settings, pins, self.oldest_s, since_ns, 1)
            if received_for_s(ledger, limit.still_since_ns) > max(limit.allowed_s, limit.information_s):
                overdue.add(since_ns)
        late = {block: since_ns for block, since_ns in state.pinned.items() if since_ns in overdue}
        times = len(overdue)
        if times < settings(self.min_times) or state.damaged:
            return
        alone = [block for block in sorted(late) if not state.owners(block)]
        share = len(alone) / (state.total - state.reserved)
        oldest_ns, pinned_at = min(late.values()), at(state.deferrals[PINS].changed_at)
        yield self.holding(
            ledger,
            key="pool",
            since_ns=ledger.wall(oldest_ns),
            position=pinned_at,
            blocks=tuple(sorted(late)),
            share_of_pool=round(share, 4),
            evidence=_pool_pin_evidence(ledger, late, alone),
            explanation=(
                f"{counted(len(late), 'block')} of the pool are pinned: a component other than a request, such as"
                f" {connector_text(ledger)}, took a reference to each, at {counted(times, 'time')}, the first"
                f" {duration(received_for_s(ledger, oldest_ns))} ago, and has not released it. No request holds"
                f" {len(alone):,} of them ({percent(share)} of the pool), and the engine can neither evict nor reuse"
                " these."
            ),
            missing=PINS_NEEDED,
        )

    def _old_pins(self, ledger: EngineLedger, settings: Settings, name: str, tier: TierState) -> Iterator[Judgement]:
        _, since_ns, *pinned_at = next(iter(tier.pins.values()))
        age, allowed = received_for_s(ledger, since_ns), settings(self.oldest_s)
        fetching = [record for record in ledger.state.requests.values() if record.fetching_ns]
        if age < allowed / 2 or any(record.fetching_ns <= since_ns for record in fetching):
            return  # a fetch that goes on needs its pins: stuck.remote-load, if it is for too long
        capacity = tier.capacity or tier.used
        share = len(tier.pins) / capacity if capacity else 1.0
        operations = {op: tier.operations.get(op, 0) for op in TierOp}
        full = tier.used >= tier.capacity > 0
        reported_at = ledger.at(tier.at)
        yield self.finding(
            ledger,
            key=name,
            pending=age < allowed or share < settings(self.min_share),
            since_ns=ledger.wall(since_ns),
            position=ledger.at(*pinned_at),
            evidence=(
                seen("pinned_blocks", len(tier.pins), "blocks of the tier", reported_at),
                seen("pinned_share", round(share, 4), "of the tier", reported_at),
                seen("oldest_pin_s", round(age, 1), "s", ledger.at(*pinned_at)),
                seen("tier_used", tier.used, "blocks of the tier", reported_at),
                seen("tier_capacity", tier.capacity, "blocks of the tier", reported_at),
                seen("tier_pins", operations[TierOp.PINNED], "blocks of the tier", reported_at),
                seen("tier_unpins", operations[TierOp.UNPINNED], "blocks of the tier", reported_at),
                seen("tier_stored", operations[TierOp.STORED], "blocks of the tier", reported_at),
                seen("tier_evicted", operations[TierOp.EVICTED], "blocks of the tier", reported_at),
                seen(
                    "fetches_in_progress",
                    len(fetching),
                    "requests",
                    ledger.at(tier.at, *(r.fetching_at for r in fetching)),
                ),
            ),
            explanation=(
                f"{counted(len(tier.pins), 'block')} ({percent(share)}) of the outer tier {name} are pinned, the"
                f" longest for {duration(age)}, although no fetch has lasted that long: the connector did not unpin"
                f" them when their fetch ended. A pinned block is never evicted. {_tier_effect(tier, full=full)}"
            ),
            case="Pins of a tier",
        )


def _pool_pin_evidence(ledger: EngineLedger, late: Mapping[int, int], alone: Sequence[int]) -> tuple[Evidence, ...]:
    state = ledger.state
    share = len(alone) / (state.total - state.reserved)
    oldest_ns, times = min(late.values()), len(set(late.values()))
    pins, pinned_at = ledger.outside_waits.pins, ledger.at(state.deferrals[PINS].changed_at)
    return (
        seen("blocks_pinned", len(late), "blocks", pinned_at),
        seen("blocks_held_by_pins_alone", len(alone), "blocks", pinned_at),
        seen("share_of_pool", round(share, 4), "of the pool", pinned_at),
        seen("times_pinned", times, "times", pinned_at),
        seen("oldest_pin_s", round(received_for_s(ledger, oldest_ns), 1), "s", pinned_at),
        seen("pins_dropped", len(pins.ended), "pins", pinned_at),
    )
