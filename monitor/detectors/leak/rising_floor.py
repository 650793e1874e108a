"""leak.rising-floor: each drain to idle leaves more blocks in use than the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import clock_time, counted, percent
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.pool_forecast import Floor
from ..detector import FromSamples, Settings, StreamDetector
from ..judgement import LIVE_REQUEST, Alternative, Evidence, HoldsBlocks, Unless, seen
from .block_effects import ROOM_IS_GONE
from .finished_held import FinishedHeld
from .lost_references import MIN_RISES, NO_AUDIT_SINCE, LostReferences, audited_since, lost_references
from .unaccounted import Unaccounted
from .usage_series import (
    METRICS_MISSING,
    connector_knowledge,
    idle_usage_floors,
    samples_with_usage,
    usage_of,
    window_s,
)

ROUNDING_SHARE: Final = 0.001
"""A share of the pool: logs print usage to a tenth of a percent."""


class RisingFloor(StreamDetector[HoldsBlocks]):
    """References left by a free that forgets a block or two, again and again.

    Sees: more blocks in use at each drain to idle, left by requests that freed the rest of theirs.
    Confirmed when: an audit of the engine's own reference counts since then agrees.
    Likely when: no audit has come since.
    Not when: the floor has not risen several times in a row; requests left all of their blocks (leak.unaccounted).
    """

    code = "leak.rising-floor"
    severity = "warning"
    title = "Each return to idle leaves more blocks in use"

    min_rises = MIN_RISES
    alternatives = (
        LIVE_REQUEST,
        Alternative("one leak that is over", "the floor rose at each of the last drains"),
        Unless("an unreported free", "an audit of the engine's own reference counts since then"),
    )
    causes = ROOM_IS_GONE

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the trend, if there is one."""
        if (lost := lost_references(ledger, settings).rising) is not None:
            yield self._trend(ledger, settings, lost)

    def _trend(self, ledger: EngineLedger, settings: Settings, lost: LostReferences) -> HoldsBlocks:
        state = ledger.state
        floors = ledger.floors.rising()
        first, last = floors[0], floors[-1]
        since = lost.since_ns(ledger)
        audited = audited_since(ledger, since)
        left_at = lost.last_at(ledger)
        rises = len(floors) - 1
        each = (last.in_use - first.in_use) / rises
        left = (state.usable - last.in_use) / each
        return self.holding(
            ledger,
            pending=not lost.certain(ledger).references
            or (ledger.now_ns - since) / 1e9 < settings(Unaccounted.grace_s),
            since_ns=since,
            position=lost.first_at(ledger),
            requests=tuple(record.id for record in lost.culprits),
            blocks=tuple(lost.references),
            share_of_pool=round(len(lost.references) / state.usable, 4),
            evidence=(
                seen("floor_rises", rises, "drains to idle", last.where),
                seen("first_floor", int(first.in_use), "blocks", first.where),
                seen("last_floor", int(last.in_use), "blocks", last.where),
                seen("floor_rise_mean", round(each, 2), "blocks", last.where),
                seen("share_of_pool", round(len(lost.references) / state.usable, 4), "of the pool", left_at),
                seen("requests_leaking", len(lost.culprits), "requests", left_at),
                Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
            ),
            explanation=(
                f"Each time the engine drains to idle, more blocks stay in use: {counted(int(first.in_use), 'block')}"
                f" at {clock_time(first.at)}, {counted(int(last.in_use), 'block')} after {rises} more such"
                f" {'drain' if rises == 1 else 'drains'}. {counted(len(lost.culprits), 'request')} ended, freed their"
                f" own blocks, and left {counted(len(lost.references), 'block')}"
                f" ({percent(len(lost.references) / state.usable)} of the pool) in use. At this rate the pool is full"
                f" after {left:,.0f} more drains."
            ),
            missing="" if audited else NO_AUDIT_SINCE,
        )


def _stands(sample: Sample) -> bool:
    """Whether nothing ran and no token came: no request accounts for the usage then."""
    return not (sample.running or sample.generation_tokens_per_s)


def _fell_below(samples: Sequence[Sample], rising: Sequence[Floor]) -> bool:
    """Whether usage was lower than a floor at a later time."""
    return any(usage_of(sample) < floor.in_use - ROUNDING_SHARE for floor in rising for sample in samples[floor.at :])


class RisingFloorFromSamples(FromSamples, RisingFloor):
    """Usage at idle that is higher after each drain.

    Sees: usage with nothing running or waiting that rises from drain to drain and never falls below an earlier floor.
    Likely when: no KV connector can explain it: none is configured, or it has lasted longer than a lease.
    Not when: usage was lower in between: a connector freed what it had kept.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the same sign, little by little, where leak.finished-held loses whole requests."""
        rising = idle_usage_floors(ledger)
        rises = len(rising) - 1
        if rises < settings(self.min_rises) or rising[-1].in_use < settings(FinishedHeld.idle_floor):
            return
        samples = samples_with_usage(ledger)
        first, last = samples[rising[0].at], samples[rising[-1].at]
        low, high = rising[0].in_use, rising[-1].in_use
        if _fell_below(samples, rising):
            return  # blocks that a connector kept were freed between two drains
        each = (high - low) / rises
        span = f"{first.position} to {last.position}"
        standing = [index for index in range(rising[-1].at, len(samples)) if _stands(samples[index])]
        lasted = window_s(samples[: max(standing, default=rising[-1].at) + 1], rising[0].at)
        if connector_knowledge(ledger) != "none" and lasted < settings(FinishedHeld.lease_s):
            # A connector that holds blocks for consumers causes such floors too, for as long as a lease. Usage while
            # requests run is their own: it does not show that what was held before still is.
            return
        yield self.holding(
            ledger,
            since_ns=first.at_ns or 0,
            position=first.position,
            share_of_pool=None,
            evidence=(
                Evidence("floor_rises", rises, "drains to idle", last.source, span),
                Evidence("first_floor", round(100 * low, 1), "%", first.source, first.position),
                Evidence("last_floor", round(100 * high, 1), "%", last.source, last.position),
                Evidence("floor_rise_mean", round(100 * each, 2), "% of the pool", last.source),
            ),
            explanation=(
                f"Each time the engine is idle, more of the pool stays in use: {percent(low)} at first, {percent(high)}"
                f" after {rises} more such drains, and usage never fell below an earlier floor. No live request holds"
                " these blocks, and vLLM counts idle cached blocks as free. At this rate the pool is full after"
                f" {(1 - high) / each:,.0f} more drains."
            ),
            case="From metrics or a log",
            missing=METRICS_MISSING,
        )
