"""leak.rising-floor: each drain to idle leaves more blocks in use than the one before.

From the stream, by references without an owner. From metrics or a log, by usage with nothing running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE
from kvscope.monitor.detectors.leak.held_from_samples import IDLE_FLOOR, LEASE_S
from kvscope.monitor.detectors.leak.lost_references import (
    KEEP_HISTORY,
    LOST_WONT_HELP,
    MIN_RISES,
    NO_AUDIT_SINCE,
    LostReferences,
    audited_since,
    lost_references,
)
from kvscope.monitor.detectors.leak.unaccounted import Unaccounted
from kvscope.monitor.detectors.leak.usage_series import (
    METRICS_MISSING,
    connector_knowledge,
    idle_usage_floors,
    samples_with_usage,
    usage_of,
    window_s,
)
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.idle_floors import Floor
from kvscope.monitor.text import clock_time, counted, percent

ROUNDING_SHARE: Final = 0.001
"""A share of the pool: logs print usage to a tenth of a percent."""


class RisingFloor(Detector[HoldsBlocks]):
    """References left by a free that forgets a block or two, again and again."""

    code = "leak.rising-floor"
    severity = "warning"
    title = "Each return to idle leaves more blocks in use"
    requires = ("stream", "metrics", "log")
    position = 190

    min_rises = MIN_RISES

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the trend, if there is one."""
        if ledger.has_stream:
            if (lost := lost_references(ledger, settings).rising) is not None:
                yield self._from_stream(ledger, settings, lost)
        elif ledger.samples:
            yield from self._from_samples(ledger, settings)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE

    def _from_stream(self, ledger: EngineLedger, settings: Settings, lost: LostReferences) -> HoldsBlocks:
        state = ledger.state
        floors = ledger.floors.rising()
        first, last = floors[0], floors[-1]
        usable = state.total - state.reserved
        since = lost.since_ns(ledger)
        audited = audited_since(ledger, since)
        left_at = lost.last_at(ledger)
        rises = len(floors) - 1
        each = (last.in_use - first.in_use) / rises
        left = (usable - last.in_use) / each
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed" if audited else "likely",
            pending=not lost.certain(ledger).references
            or (ledger.now_ns - since) / 1e9 < settings(Unaccounted.grace_s),
            since_ns=since,
            position=lost.first_at(ledger),
            requests=tuple(record.id for record in lost.culprits),
            blocks=tuple(lost.references),
            share_of_pool=round(len(lost.references) / usable, 4),
            evidence=(
                Evidence("floor_rises", rises, "drains to idle", position=last.where),
                Evidence("first_floor", int(first.in_use), "blocks", position=first.where),
                Evidence("last_floor", int(last.in_use), "blocks", position=last.where),
                Evidence("floor_rise_mean", round(each, 2), "blocks", position=last.where),
                Evidence("share_of_pool", round(len(lost.references) / usable, 4), "of the pool", position=left_at),
                Evidence("requests_leaking", len(lost.culprits), "requests", position=left_at),
                Evidence("audits_since", int(audited), "audits", "audit", position=ledger.at(state.places.audited)),
            ),
            explanation=(
                "Each time the engine drains to idle, more blocks stay in use:"
                f" {counted(int(first.in_use), 'block')} at {clock_time(first.at)},"
                f" {counted(int(last.in_use), 'block')} after {rises} more such"
                f" {'drain' if rises == 1 else 'drains'}. {counted(len(lost.culprits), 'request')} ended, freed"
                f" their own blocks, and left {counted(len(lost.references), 'block')}"
                f" ({percent(len(lost.references) / usable)} of the pool) in use. At this rate the pool is full"
                f" after {left:,.0f} more drains."
            ),
            do_now=(
                "Plan a restart of this engine for a quiet hour: only a restart frees the blocks.",
                KEEP_HISTORY,
            ),
            change=(
                "The engine does not free every block of a request when it ends. This is an engine bug: report it"
                " with that history, and upgrade to a release with the fix.",
            ),
            wont_help=LOST_WONT_HELP,
            missing="" if audited else NO_AUDIT_SINCE,
        )

    def _from_samples(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Judge the same sign, little by little, where leak.finished-held loses whole requests."""
        samples, rising = samples_with_usage(ledger), idle_usage_floors(ledger)
        rises = len(rising) - 1
        if rises < settings(self.min_rises) or rising[-1].in_use < settings(IDLE_FLOOR):
            return
        first, last = samples[rising[0].at], samples[rising[-1].at]
        low, high = rising[0].in_use, rising[-1].in_use
        if _fell_below(samples, rising):
            return  # blocks that a connector kept were freed between two drains
        each = (high - low) / rises
        span = f"{first.position} to {last.position}"
        standing = [index for index in range(rising[-1].at, len(samples)) if _stands(samples[index])]
        lasted = window_s(samples[: max(standing, default=rising[-1].at) + 1], rising[0].at)
        if connector_knowledge(ledger) != "none" and lasted < settings(LEASE_S):
            # A connector that holds blocks for consumers causes such floors too, for as long as a lease. Usage while
            # requests run is their own: it does not show that what was held before still is.
            return
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
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
                f"Each time the engine is idle, more of the pool stays in use: {percent(low)} at first,"
                f" {percent(high)} after {rises} more such drains, and usage never fell below an earlier floor. No"
                " live request holds these blocks, and vLLM counts idle cached blocks as free. At this rate the"
                f" pool is full after {(1 - high) / each:,.0f} more drains."
            ),
            do_now=("Plan a restart of this engine for a quiet hour: only a restart frees the blocks.",),
            change=(
                "Find the requests that leave them: the event stream names them. This is an engine bug: report it,"
                " and upgrade to a release with the fix.",
            ),
            wont_help=(
                "Lowering max_num_seqs, or adding capacity: running requests do not hold these blocks.",
                "A larger gpu_memory_utilization: the pool also fills, only later.",
            ),
            missing=METRICS_MISSING,
        )


def _stands(sample: Sample) -> bool:
    """Whether nothing ran and no token came: no request accounts for the usage then."""
    return not (sample.running or sample.generation_tokens_per_s)


def _fell_below(samples: Sequence[Sample], rising: Sequence[Floor]) -> bool:
    """Whether usage was lower than a floor at a later time."""
    return any(usage_of(sample) < floor.in_use - ROUNDING_SHARE for floor in rising for sample in samples[floor.at :])
