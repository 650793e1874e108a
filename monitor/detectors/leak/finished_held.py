"""leak.finished-held: finished requests keep their blocks.

From the stream: the engine asks its KV connector, and the connector never reports that the blocks were sent. While an
engine with work does not ask either, its steps have stopped: that is stuck.engine-stalled, and no leak. From metrics
or a log: monitor/detectors/leak/held_from_samples.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

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
    HELD_LEASE_SLACK_S,
    Kept,
    kept,
    may_be_first_transfers,
    oldest_deferral_text,
    overdue_sends,
)
from kvscope.monitor.detectors.leak.held_from_samples import (
    FULL_POOL,
    IDLE_FLOOR,
    LEASE_S,
    MAX_CONSTANT,
    MAX_FALL,
    MAX_RUNNING_LEFT,
    MIN_CHANGE_FIT,
    MIN_CHANGES,
    MIN_LEFT,
    MIN_RISE,
    STARVED_S,
    held_by_samples,
)
from kvscope.monitor.detectors.leak.lost_references import MIN_RISES
from kvscope.monitor.detectors.leak.usage_series import (
    METRICS_CHANGE,
    METRICS_DO_NOW,
    METRICS_MISSING,
    idle_usage_floors,
)
from kvscope.monitor.detectors.outside_pace import (
    FEWEST_SEEN,
    HELD_GRACE_S,
    MORE_TIME,
    TIMES_LONGEST_WAIT,
    UNPROVEN_SHARE,
    UNSEEN_TIMES,
    UNSEEN_TOGETHER_S,
)
from kvscope.monitor.detectors.sample_math import DEFAULT_INTERVAL_S
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral, RequestState
from kvscope.monitor.text import clock_time, counted, percent

LEASE_FLAGS: Final = {
    "vllm": "VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480 with NIXL, or a release since PR #41383, whose leases are renewed",
    "kvscope": "--kv-lease-seconds 480",
}


INSPECT_CONSUMER: Final = (
    "Inspect the other end of the transfers: a consumer that died or lost them cannot confirm them."
)
FINISHED_HELD_DO_NOW: Final = (INSPECT_CONSUMER, RESTART_ONLY)
UNKNOWN_LEASE_DO_NOW: Final = (
    INSPECT_CONSUMER,
    "If the consumer works, wait: it may renew its lease while its own queue is long, and the blocks become free"
    " afterwards.",
)


def _missing(damaged: bool, polled: bool, unknown_lease: bool, without_lease: bool) -> str:
    """Return the evidence that would confirm it."""
    if damaged:
        return "the lost events"
    if not polled:
        return "an answer from the connector: the engine does not poll it although requests wait"
    if unknown_lease:
        return "the connector's lease, which it does not expose: its consumer may renew it and free the blocks later"
    if without_lease:
        return "a lease, or the connector's own record of the transfer: without either, a slow transfer looks the same"
    return ""


class FinishedHeld(Detector[HoldsBlocks]):
    """Blocks that a KV connector keeps for finished requests, and never frees."""

    code = "leak.finished-held"
    severity = "error"
    title = "Finished requests keep their blocks"
    requires = ("stream", "metrics", "log")
    position = 110
    sample_need = SampleNeed(
        3, STARVED_S, "nothing runs while requests wait for room. At idle, where a KV connector may hold blocks, 8 min"
    )

    grace_s = HELD_GRACE_S
    lease_slack_s = HELD_LEASE_SLACK_S
    times_longest = TIMES_LONGEST_WAIT
    unseen_times = UNSEEN_TIMES
    unseen_together_s = UNSEEN_TOGETHER_S
    fewest_seen = FEWEST_SEEN
    unproven_share = UNPROVEN_SHARE
    starved_s = STARVED_S
    lease_s = LEASE_S
    min_samples = MIN_CHANGES
    min_fit = MIN_CHANGE_FIT
    max_constant = MAX_CONSTANT
    max_running_left = MAX_RUNNING_LEFT
    min_left = MIN_LEFT
    min_rise = MIN_RISE
    max_fall = MAX_FALL
    idle_floor = IDLE_FLOOR
    full_pool = FULL_POOL

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the blocks kept for a connector that is polled and never reports, or the signs in the samples."""
        if ledger.has_stream:
            late, pending = overdue_sends(ledger, settings)
            if late:
                yield self._from_stream(ledger, settings, late, pending)
        elif ledger.samples:
            yield from self._from_samples(ledger, settings)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE_FOR_GOOD

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, late: list[Deferral], pending: bool
    ) -> HoldsBlocks:
        state, polled = ledger.state, connector_holds(ledger).polled
        held, at = kept(ledger, late), ledger.at
        first = may_be_first_transfers(ledger, settings, held)
        count, records = len(held.deferrals), records_of(ledger, late)
        unknown_lease = any(deferral.lease_deadline_ns < 0 for deferral in late)
        without_lease = any(deferral.lease_deadline_ns == 0 for deferral in late) and not ledger.description.kv_lease_s
        missing = _missing(state.damaged, polled, unknown_lease, without_lease)
        return HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="cannot-tell" if first else "likely" if missing else "confirmed",
            severity="info" if first else None,
            pending=pending,
            since_ns=ledger.wall(held.deferrals[0].since_ns),
            position=at(held.kept_at[0]),
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=_held_evidence(ledger, held, records),
            explanation=(
                f"{counted(count, 'finished request')} still {'holds' if count == 1 else 'hold'}"
                f" {counted(len(held.blocks), 'block')} ({percent(held.share)} of the pool). At the end of each,"
                f" {connector_text(ledger)} asked to keep its blocks until it had sent them, and never reported"
                f" completion. {oldest_deferral_text(ledger, held)}"
            ),
            do_now=UNKNOWN_LEASE_DO_NOW if unknown_lease else FINISHED_HELD_DO_NOW,
            change=(
                "Give the connector a lease, so that an unconfirmed transfer ends by itself:"
                f" {at_hand(ledger, **LEASE_FLAGS)}.",
                "If you do not need to transfer requests, run without the connector: remove"
                f" {at_hand(ledger, vllm='--kv-transfer-config', kvscope='--kv-connector')}.",
            ),
            wont_help=KEPT_WONT_HELP,
            missing=MORE_TIME if first else missing,
        )

    def _from_failed_reset(self, ledger: EngineLedger) -> Iterator[HoldsBlocks]:
        """Yield a judgement from a failed reset of the prefix cache, which reports the blocks in use: an idle engine
        has none.

        An idle engine stops logging: the line before the warning shows it, and the one soon after it.
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
                f"A reset of the prefix cache failed at {clock_time(at_ns)} because"
                f" {counted(warning.value, 'block')} were still in use while nothing was running or waiting: no live"
                " request holds them."
            ),
            do_now=METRICS_DO_NOW,
            change=METRICS_CHANGE,
            wont_help=("Resetting again: the engine refuses it as long as the blocks are held.",),
            missing=METRICS_MISSING,
        )

    def _from_samples(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        floors_rise = len(idle_usage_floors(ledger)) > settings(MIN_RISES)
        found = list(held_by_samples(ledger, settings, self.code, self.grace_s, floors_rise=floors_rise))
        yield from found or self._from_failed_reset(ledger)


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
