"""leak.finished-held: finished requests keep their blocks.

From the stream: the engine asks its KV connector, and the connector never reports that the blocks were sent. While an
engine with work does not ask either, its steps have stopped: that is stuck.engine-stalled, and no leak. From metrics
or a log: usage follows the prompts taken in, or stays up with nothing running.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvscope.monitor.detectors.advice import at_hand
from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE_FOR_GOOD
from kvscope.monitor.detectors.leak.connector_holds import (
    KEPT_WONT_HELP,
    RESTART_ONLY,
    connector_holds,
    connector_text,
    records_of,
)
from kvscope.monitor.detectors.leak.deferred_blocks import (
    HELD_GRACE_S,
    HELD_LEASE_SLACK_S,
    Kept,
    kept,
    oldest_deferral_text,
    overdue_sends,
)
from kvscope.monitor.detectors.leak.lost_references import MIN_RISES
from kvscope.monitor.detectors.leak.usage_series import (
    METRICS_CHANGE,
    METRICS_DO_NOW,
    METRICS_MISSING,
    UsageFit,
    UsageSeries,
    fit_of,
    idle_usage_floors,
    lasted_s,
    ratchet_evidence,
    samples_with_usage,
    series_of,
    usage_of,
)
from kvscope.monitor.detectors.sample_math import DEFAULT_INTERVAL_S
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral, RequestState
from kvscope.monitor.text import clock_time, counted, percent

LEASE_FLAGS: Final = {
    "vllm": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480 with NIXL, or a release since PR #41383, whose leases are renewed",
    "kvscope": "--kv-lease-seconds 480",
}


class UsageSigns(NamedTuple):
    """What samples show: where the last idle window with blocks in use begins, and the fit of usage to prompts."""

    floor: int | None
    series: UsageSeries | None
    fit: UsageFit | None


INSPECT_CONSUMER: Final = (
    "Inspect the other end of the transfers: a consumer that died, or lost them, cannot confirm them."
)
FINISHED_HELD_DO_NOW: Final = (INSPECT_CONSUMER, RESTART_ONLY)
UNKNOWN_LEASE_DO_NOW: Final = (
    INSPECT_CONSUMER,
    "If the consumer works, wait: it may renew its lease while its own queue is long, and the blocks come free then.",
)


def _missing(damaged: bool, polled: bool, unknown_lease: bool) -> str:
    """What would confirm it."""
    if damaged:
        return "the events that were lost"
    if not polled:
        return "an answer of the connector: the engine does not ask it, though requests wait"
    if unknown_lease:
        return "the connector's lease, which it does not show: its consumer may renew it, and the blocks come free then"
    return ""


class FinishedHeld(Detector[HoldsBlocks]):
    """Blocks that a KV connector keeps for finished requests, and never gives back."""

    code = "leak.finished-held"
    severity = "error"
    title = "Finished requests keep their blocks"
    requires = ("stream", "metrics", "log")
    position = 110

    grace_s = HELD_GRACE_S
    lease_slack_s = HELD_LEASE_SLACK_S
    min_samples = Threshold(
        6, "lines", "a line through fewer points fits by chance: two large prompts after a quiet spell are enough"
    )
    min_fit = Threshold(
        0.95, "R²", "usage that follows the running sum of prompt tokens this closely is not made by live requests"
    )
    max_correlation = Threshold(0.5, "r", "usage made by live requests moves with their number")
    min_rise = Threshold(0.2, "of the pool", "a smaller rise is within one request's size")
    max_fall = Threshold(0.1, "of the pool", "where blocks do come back, usage falls by a request's worth now and then")
    steady_samples = Threshold(30, "lines", "under a load that does not go away, usage must have climbed for this long")
    idle_floor = Threshold(0.02, "of the pool", "with nothing running, usage above this is not rounding")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield what is kept for a connector that is asked and never reports; from samples, what usage shows."""
        if ledger.has_stream:
            late, pending = overdue_sends(ledger, settings)
            if late:
                yield self._from_stream(ledger, late, pending, connector_holds(ledger).polled)
        elif ledger.samples:
            yield from self._from_samples(ledger, settings)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE_FOR_GOOD

    def _from_stream(self, ledger: EngineLedger, late: list[Deferral], pending: bool, polled: bool) -> HoldsBlocks:
        state = ledger.state
        held, at = kept(ledger, late), ledger.at
        count, records = len(held.deferrals), records_of(ledger, late)
        unknown_lease = any(deferral.lease_deadline_ns < 0 for deferral in late)
        missing = _missing(state.damaged, polled, unknown_lease)
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if missing else "confirmed",
            # After a loss its release may be among what was lost; the next audit tells.
            pending=pending or state.damaged,
            since_ns=ledger.wall(held.deferrals[0].since_ns),
            position=at(held.kept_at[0]),
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=_held_evidence(ledger, held, records),
            explanation=(
                f"{counted(count, 'finished request')} still {'holds' if count == 1 else 'hold'}"
                f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). At the end of each,"
                f" {connector_text(ledger)} asked to keep its blocks until it had sent them, and has never said that"
                f" it is done. {oldest_deferral_text(ledger, held)}"
            ),
            do_now=UNKNOWN_LEASE_DO_NOW if unknown_lease else FINISHED_HELD_DO_NOW,
            change=(
                "Give the connector a lease, so that an unconfirmed transfer ends by itself:"
                f" {at_hand(ledger, **LEASE_FLAGS)}.",
                "If requests need not be handed on, run without the connector: drop"
                f" {at_hand(ledger, vllm='--kv-transfer-config', kvscope='--kv-connector')}.",
            ),
            wont_help=KEPT_WONT_HELP,
            missing=missing,
        )

    def _from_failed_reset(self, ledger: EngineLedger) -> Iterator[HoldsBlocks]:
        """An engine that may not reset its prefix cache because blocks are in use says how many; idle, it has none.

        One that is idle stops logging: the line before the warning tells, and the one that comes soon after it.
        """
        warning = ledger.facts.get("blocks_not_freed")
        if warning is None or warning.at_ns is None or not isinstance(warning.value, int) or not warning.value:
            return
        at_ns = warning.at_ns
        before = [s for s in ledger.samples if s.at_ns is not None and s.at_ns <= at_ns]
        after = [
            s for s in ledger.samples if s.at_ns is not None and at_ns < s.at_ns <= at_ns + DEFAULT_INTERVAL_S * 1e9
        ]
        if not before or any(sample.running or sample.waiting for sample in (before[-1], *after[:1])):
            return
        if before[-1].running is None or before[-1].waiting is None:
            return
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            since_ns=at_ns,
            position=warning.position,
            share_of_pool=None,
            evidence=(
                Evidence("blocks_not_freed", warning.value, "blocks", "log", warning.position),
                Evidence("running", 0, "requests", "log", before[-1].position),
                Evidence("waiting", 0, "requests", "log", before[-1].position),
            ),
            explanation=(
                f"A reset of the prefix cache failed at {clock_time(at_ns)} because {counted(warning.value, 'block')}"
                " were not freed yet, and nothing was running or waiting: no live request holds them."
            ),
            do_now=METRICS_DO_NOW,
            change=METRICS_CHANGE,
            wont_help=("Resetting again: it is refused for as long as the blocks are held.",),
            missing=METRICS_MISSING,
        )

    def _idle_floor(self, samples: Sequence[Sample], settings: Settings) -> int | None:
        """Where the last stretch with nothing running, yet blocks in use, begins, if the samples end in one."""
        start = len(samples)
        while start > 0 and not samples[start - 1].running and not samples[start - 1].deferred:
            start -= 1
            if samples[start].generation_tokens_per_s:
                break  # something had run since the sample before
        floor = min((usage_of(sample) for sample in samples[start:]), default=0.0)
        return start if floor >= settings(self.idle_floor) else None

    def _may_ratchet(self, samples: Sequence[Sample], settings: Settings) -> bool:
        """Whether usage has climbed and never come back: what is quickly seen not to be so of most engines."""
        if usage_of(samples[-1]) - usage_of(samples[0]) < settings(self.min_rise):
            return False
        highest, most = 0.0, settings(self.max_fall)
        for sample in samples:
            usage = sample.usage or 0.0
            if highest - usage > most:
                return False
            highest = max(highest, usage)
        return True

    def _ratchet(self, series: UsageSeries, settings: Settings) -> UsageFit | None:
        """Usage that climbs with what was ever taken in, and not with what is running."""
        fit = fit_of(series)
        usage, running = series.usage, series.running
        if fit is None or len(usage) < settings(self.min_samples):
            return None
        load_went = running[-1] <= max(running) / 2
        if (
            fit.slope > 0
            and fit.r_squared >= settings(self.min_fit)
            and fit.correlation <= settings(self.max_correlation)
            and (load_went or len(usage) >= settings(self.steady_samples))
        ):
            return fit
        return None

    def usage_signs(self, ledger: EngineLedger, settings: Settings) -> UsageSigns | None:
        """Return the signs of a leak in the samples; None where there are none."""
        samples = samples_with_usage(ledger)
        if len(samples) < 2:
            return None
        # After a drain to nothing running, usage is what no live request holds.
        floor = self._idle_floor(samples, settings)
        series = series_of(samples) if self._may_ratchet(samples, settings) else None
        fit = self._ratchet(series, settings) if series is not None else None
        return None if floor is None and fit is None else UsageSigns(floor, series, fit)

    def _from_samples(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        signs = self.usage_signs(ledger, settings)
        if signs is None:
            yield from self._from_failed_reset(ledger)
        elif signs.fit is not None or len(idle_usage_floors(ledger)) - 1 < settings(MIN_RISES):
            yield self._from_usage(ledger, settings, signs)

    def _from_usage(self, ledger: EngineLedger, settings: Settings, found: UsageSigns) -> HoldsBlocks:
        samples, (floor, series, fit) = samples_with_usage(ledger), found
        evidence = ratchet_evidence(series) if series is not None else []
        first, last = samples[0], samples[-1]
        signs = []
        pending = fit is None
        if floor is not None:
            start = samples[floor]
            pending = pending and lasted_s(ledger, samples, floor) < settings(self.grace_s)
            evidence.append(Evidence("idle_usage", round(100 * usage_of(last), 1), "%", start.source, start.position))
            waiting = f" and {start.waiting} waiting" if start.waiting else ""
            signs.append(f"usage stays at {percent(usage_of(last))} with nothing running{waiting}")
        if fit is not None:
            signs.append(
                f"usage follows the running sum of prompt tokens (R² {fit.r_squared:.3f}, {100 * fit.slope:.2f} % of"
                f" the pool for each thousand), not the number of running requests (correlation {fit.correlation:.2f})"
            )
        course = ""
        if len({(sample.usage, sample.running) for sample in samples}) > 1:
            course = (
                f" From {percent(usage_of(first))} with {first.running} running at first to {percent(usage_of(last))}"
                f" with {last.running} at last."
            )
        since_sample = samples[floor if floor is not None else 0]
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="likely",
            pending=pending,
            since_ns=since_sample.at_ns or 0,
            position=since_sample.position,
            share_of_pool=None,
            evidence=tuple(evidence),
            explanation=(
                f"Requests leave and their blocks stay: {' and '.join(signs)}.{course} This excludes high load (usage"
                " would fall with Running), one long request and growth by decoding (usage would not follow"
                " arrivals), and a warm prefix cache (vLLM counts cached blocks nobody uses as free)."
            ),
            do_now=METRICS_DO_NOW,
            change=METRICS_CHANGE,
            wont_help=(
                "Lowering max_num_seqs, or adding capacity: the running requests are not what fills the pool.",
                "A larger gpu_memory_utilization: it only takes longer to fill.",
            ),
            missing=METRICS_MISSING,
        )


def _held_evidence(ledger: EngineLedger, held: Kept, records: list[RequestState]) -> tuple[Evidence, ...]:
    state, at, count = ledger.state, ledger.at, len(held.deferrals)
    return (
        Evidence("requests_held", count, "requests", position=at(*held.kept_at)),
        Evidence("blocks_held", len(held.blocks), "blocks", position=at(*held.blocks_at)),
        Evidence("share_of_pool", round(held.share, 4), "of the pool", position=at(*held.blocks_at)),
        Evidence(
            "oldest_age_s",
            round(ledger.age_s(held.deferrals[0].since_ns), 1),
            "s",
            position=at(held.kept_at[0]),
        ),
        Evidence(
            "prompt_tokens_held",
            sum(r.prompt_tokens for r in records),
            "tokens",
            position=at(*(r.arrived_at for r in records)),
        ),
        Evidence(
            "running",
            sum(r.is_running for r in state.requests.values()),
            "requests",
            position=at(state.places.moved),
        ),
        Evidence(
            "connector_polls",
            state.heartbeat.connector_polls if state.heartbeat else "not heard",
            "polls",
            position=at(state.places.heartbeat),
        ),
    )
