"""leak.remote-load-lost: KV was being fetched into the blocks when their request ended, and the fetch never reported.

While an engine with work does not ask its connector, its steps have stopped: that is stuck.engine-stalled, and no leak.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, HoldsBlocks, Verdict
from kvscope.monitor.detectors.leak.block_effects import ROOM_IS_GONE_FOR_GOOD
from kvscope.monitor.detectors.leak.connector_holds import (
    KEPT_WONT_HELP,
    RESTART_ONLY,
    connector_holds,
    connector_text,
    records_of,
)
from kvscope.monitor.detectors.leak.deferred_blocks import (
    Kept,
    kept,
    oldest_deferral_text,
    overdue_deferrals,
    received_for_s,
)
from kvscope.monitor.detectors.outside_pace import (
    MORE_TIME,
    OutsideWaitLimit,
    may_be_slow,
    outside_wait_limit,
)
from kvscope.monitor.detectors.stuck.fetch_waits import TRANSFER_PROGRESS
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral, RequestState
from kvscope.monitor.text import clock_time, counted, percent

REMOTE_LOAD_LOST_DO_NOW: Final = (
    "Inspect the producer that should send this KV: one that died or dropped the request never reports.",
    RESTART_ONLY,
)


REMOTE_LOAD_LOST_CHANGE: Final = (
    "vLLM never ends such a fetch by itself (NIXL in push mode, #46283; Mooncake, #35943): upgrade to a release in"
    " which an aborted fetch has a deadline, or let the consumer pull (kv_connector NixlConnector).",
    "Set client time-outs longer than a fetch takes: every request aborted during a fetch is at risk.",
)


REMOTE_LOAD_LOST_WONT_HELP: Final = (
    *KEPT_WONT_HELP,
    "A lease (VLLM_NIXL_ABORT_REQUEST_TIMEOUT): it covers blocks kept for sending, not blocks being fetched.",
)


class RemoteLoadLost(Detector[HoldsBlocks]):
    """Blocks of ended requests that wait for a fetch that never reports."""

    code = "leak.remote-load-lost"
    severity = "error"
    title = "Blocks of aborted requests wait for a fetch that never completes"
    requires = ("stream",)
    position = 100

    grace_s = Threshold(
        10,
        "s",
        "the fetch of one request's KV takes milliseconds to seconds, and no request waits for this one any more",
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the fetches that never reported, while the engine asks or has nothing to run."""
        if ledger.has_stream:
            holds = connector_holds(ledger)
            if holds.polled or holds.idle:
                yield from self._judge_fetches(ledger, settings, holds.fetching)

    def causes(self) -> Causes[HoldsBlocks]:
        """Return what it may cause."""
        return ROOM_IS_GONE_FOR_GOOD

    def _waited_s(self, ledger: EngineLedger, settings: Settings, deferral: Deferral) -> tuple[float, float]:
        """Return for how long the fetch has shown no progress since its request ended, and how long it may not."""
        limit = self._limit(ledger, settings, deferral)
        return received_for_s(ledger, max(limit.still_since_ns, deferral.since_ns)), limit.allowed_s

    def _limit(self, ledger: EngineLedger, settings: Settings, deferral: Deferral) -> OutsideWaitLimit:
        record = ledger.state.requests.get(deferral.request)
        if record is None or record.fetch_ended_ns:
            return OutsideWaitLimit(deferral.since_ns, settings(self.grace_s))
        return outside_wait_limit(
            ledger,
            settings,
            ledger.outside_waits.fetches,
            self.grace_s,
            record.fetching_ns or deferral.since_ns,
            max(len(deferral.blocks), 1),
        )

    def _may_be_first(self, ledger: EngineLedger, settings: Settings, held: Kept) -> bool:
        """Return whether all may be slow fetches."""
        limits = [self._limit(ledger, settings, deferral) for deferral in held.deferrals]
        return may_be_slow([(received_for_s(ledger, limit.still_since_ns), limit) for limit in limits])

    def _judge_fetches(
        self, ledger: EngineLedger, settings: Settings, fetching: list[Deferral]
    ) -> Iterator[HoldsBlocks]:
        state = ledger.state
        late, pending = overdue_deferrals(ledger, fetching, lambda deferral: self._waited_s(ledger, settings, deferral))
        if not late:
            return
        held, at = kept(ledger, late), ledger.at
        count = len(held.deferrals)
        records = records_of(ledger, late)
        first = min(records, key=lambda record: record.fetching_ns)
        began = first.fetching_ns
        ended = [record for record in records if record.fetch_ended_ns]
        is_first = self._may_be_first(ledger, settings, held)
        verdict: Verdict = "confirmed" if len(ended) == len(records) and not state.damaged else "likely"
        yield HoldsBlocks(
            code=self.code,
            engine=ledger.engine,
            verdict="cannot-tell" if is_first else verdict,
            severity="info" if is_first else None,
            pending=pending,
            since_ns=ledger.wall(held.deferrals[0].since_ns),
            position=at(held.kept_at[0]),
            requests=held.ids,
            share_of_pool=round(held.share, 4),
            blocks=tuple(held.blocks),
            evidence=_fetch_evidence(ledger, held, first, ended),
            explanation=(
                f"{counted(count, 'request')} ended while {connector_text(ledger)} was fetching KV into"
                f" {'its' if count == 1 else 'their'} {counted(len(held.blocks), 'block')} ({percent(held.share)} of"
                " the pool). The fetch may still write to the blocks, so they stay until it reports success or"
                f" failure, and {'the engine has not processed that report' if ended else 'it never did'}. The first"
                f" fetch began at {clock_time(ledger.wall(began))}. {oldest_deferral_text(ledger, held)}"
            ),
            do_now=REMOTE_LOAD_LOST_DO_NOW,
            change=REMOTE_LOAD_LOST_CHANGE,
            wont_help=REMOTE_LOAD_LOST_WONT_HELP,
            missing=(
                "the lost events"
                if state.damaged
                else ""
                if len(ended) == len(records)
                else MORE_TIME
                if is_first
                else TRANSFER_PROGRESS
            ),
        )


def _fetch_evidence(
    ledger: EngineLedger, held: Kept, first: RequestState, ended: list[RequestState]
) -> tuple[Evidence, ...]:
    state, at, count, began = ledger.state, ledger.at, len(held.deferrals), first.fetching_ns
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
        Evidence("oldest_fetch_s", round(ledger.age_s(began), 1), "s", position=at(first.fetching_at)),
        Evidence(
            "lost_fetches_reported_complete",
            len(ended),
            "fetches",
            position=at(*held.kept_at, *(r.fetch_ended_at for r in ended)),
        ),
        Evidence(
            "running",
            sum(r.is_running for r in state.requests.values()),
            "requests",
            position=at(state.places.moved),
        ),
    )
