"""leak.external-pins: blocks stay pinned though no request needs them, and cannot be evicted.

Blocks of an outer tier: the stream has keys of them, and does not report which fetch a pin was for. Blocks of the pool,
of which something other than a request, such as a connector, keeps taking references and drops none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks, Judgement
from kvscope.monitor.detectors.leak.connector_holds import KEPT_WONT_HELP, RESTART_ONLY, connector_text
from kvscope.monitor.detectors.leak.deferred_blocks import received_for_s
from kvscope.monitor.detectors.outside_pace import outside_wait_limit
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Tier, TierOp, name_of
from kvscope.monitor.events.wire import PINS
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import TierState
from kvscope.monitor.text import counted, duration, percent

PINS_NEEDED: Final = "whether the pins are still needed: the connector's own record of them"
POOL_PINS_CHANGE: Final = (
    "The component that takes the references has a bug, usually a connector at the end of a fetch or lookup: report"
    " it, and upgrade (vLLM with LMCache: #35931, #44100; LMCache: #2951).",
    "Until then, run without the connector: remove --kv-transfer-config.",
)


def _tier_effect(tier: TierState, *, full: bool) -> str:
    if full:
        return f"The tier is full ({tier.used:,} blocks), so it cannot reuse the pinned blocks."
    return f"The tier uses {tier.used:,} of {tier.capacity:,} blocks. Once it is full, it can store that much less."


class ExternalPins(Detector[Judgement]):
    """Pins in an outer tier that are older than every fetch that still goes on."""

    code = "leak.external-pins"
    severity = "warning"
    title = "Pinned blocks are never unpinned"
    requires = ("stream",)
    position = 160

    oldest_s = Threshold(
        10,
        "s",
        "a pin lasts as long as a fetch, milliseconds to seconds. While the fetch is in progress it may be older",
    )
    min_share = Threshold(0.1, "of the tier", "a tier that lacks less than this serves nearly as well as a whole one")
    min_times = Threshold(
        3, "times", "pins of the pool that are taken once or twice may be meant to stay, as those of a system prompt"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the pins of the pool, and of each tier, that outlived what they were for."""
        if ledger.has_stream:
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
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            key="pool",
            verdict="likely",
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
            do_now=(RESTART_ONLY,),
            change=POOL_PINS_CHANGE,
            wont_help=KEPT_WONT_HELP,
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
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            key=name,
            verdict="confirmed",
            pending=age < allowed or share < settings(self.min_share),
            since_ns=ledger.wall(since_ns),
            position=ledger.at(*pinned_at),
            evidence=(
                Evidence("pinned_blocks", len(tier.pins), "blocks of the tier", position=reported_at),
                Evidence("pinned_share", round(share, 4), "of the tier", position=reported_at),
                Evidence("oldest_pin_s", round(age, 1), "s", position=ledger.at(*pinned_at)),
                Evidence("tier_used", tier.used, "blocks of the tier", position=reported_at),
                Evidence("tier_capacity", tier.capacity, "blocks of the tier", position=reported_at),
                Evidence("tier_pins", operations[TierOp.PINNED], "blocks of the tier", position=reported_at),
                Evidence("tier_unpins", operations[TierOp.UNPINNED], "blocks of the tier", position=reported_at),
                Evidence("tier_stored", operations[TierOp.STORED], "blocks of the tier", position=reported_at),
                Evidence("tier_evicted", operations[TierOp.EVICTED], "blocks of the tier", position=reported_at),
                Evidence(
                    "fetches_in_progress",
                    len(fetching),
                    "requests",
                    position=ledger.at(tier.at, *(r.fetching_at for r in fetching)),
                ),
            ),
            explanation=(
                f"{counted(len(tier.pins), 'block')} ({percent(share)}) of the outer tier {name} are pinned, the"
                f" longest for {duration(age)}, although no fetch has lasted that long: the connector did not unpin"
                f" them when their fetch ended. A pinned block is never evicted. {_tier_effect(tier, full=full)}"
            ),
            do_now=(
                "The pool has lost nothing: prompts that the tier can no longer serve are computed instead.",
                "Restart the process that owns the tier to drop the pins. This also drops its contents.",
            ),
            change=(
                "The connector has a bug on a path that ends a fetch, often an abort before the fetch begins:"
                " report it, and upgrade (vLLM with LMCache: #35931, #44100).",
                "Set a time to live for pins or locks if the tier has one (LMCache's server drops read locks then).",
            ),
            wont_help=(
                "A larger tier: it also fills with pinned blocks, only later.",
                "Resetting the engine's prefix cache: it does not reach the outer tier.",
            ),
        )


def _pool_pin_evidence(ledger: EngineLedger, late: Mapping[int, int], alone: Sequence[int]) -> tuple[Evidence, ...]:
    state = ledger.state
    share = len(alone) / (state.total - state.reserved)
    oldest_ns, times = min(late.values()), len(set(late.values()))
    pins, pinned_at = ledger.outside_waits.pins, ledger.at(state.deferrals[PINS].changed_at)
    return (
        Evidence("blocks_pinned", len(late), "blocks", position=pinned_at),
        Evidence("blocks_held_by_pins_alone", len(alone), "blocks", position=pinned_at),
        Evidence("share_of_pool", round(share, 4), "of the pool", position=pinned_at),
        Evidence("times_pinned", times, "times", position=pinned_at),
        Evidence("oldest_pin_s", round(received_for_s(ledger, oldest_ns), 1), "s", position=pinned_at),
        Evidence("pins_dropped", len(pins.ended), "pins", position=pinned_at),
    )
