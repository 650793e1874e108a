"""leak.remote-load-lost: a request ended while KV was fetched into its blocks, and the fetch never reported."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, percent
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import Deferral, RequestState
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import MORE_TIME, OutsideWaitLimit, may_be_slow, outside_wait_limit
from ..judgement import LIVE_REQUEST, SLOW_TRANSFER, Evidence, HoldsBlocks, Verdict, seen
from ..stuck.waiting_requests import TRANSFER_PROGRESS
from .block_effects import ROOM_IS_GONE_FOR_GOOD
from .deferred_blocks import (
    Kept,
    connector_holds,
    connector_text,
    kept,
    oldest_deferral_text,
    overdue_deferrals,
    received_for_s,
    records_of,
)


class RemoteLoadLost(StreamDetector[HoldsBlocks]):
    """Blocks of ended requests that wait for a fetch that never reports.

    Sees: requests that ended while KV was fetched into their blocks, for longer than fetches of this engine take.
    Confirmed when: the connector reported the end of every such fetch, and the engine keeps the blocks all the same.
    Likely when: no end was reported, or events were lost.
    Cannot tell: first fetches of an engine may simply be slow.
    Not when: an engine with work does not poll its connector (stuck.engine-stalled).
    """

    code = "leak.remote-load-lost"
    severity = "error"
    title = "Blocks of aborted requests wait for a fetch that never completes"
    moves_kv = "fetch"

    grace_s = Threshold(
        10,
        "s",
        "the fetch of one request's KV takes milliseconds to seconds, and no request waits for this one any more",
    )
    alternatives = (LIVE_REQUEST, SLOW_TRANSFER)
    causes = ROOM_IS_GONE_FOR_GOOD

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the fetches that never reported, while the engine asks or has nothing to run."""
        holds = connector_holds(ledger)
        if holds.polled or holds.idle:
            yield from self._judge_fetches(ledger, settings, holds.fetching)

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
        yield self.holding(
            ledger,
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
                " the pool). The fetch may still write to the blocks, so they stay until it reports success or failure,"
                f" and {'the engine has not processed that report' if ended else 'it never did'}. The first fetch began"
                f" at {clock_time(ledger.wall(began))}. {oldest_deferral_text(ledger, held)}"
            ),
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
        seen("requests_held", count, "requests", at(*held.kept_at)),
        seen("blocks_held", len(held.blocks), "blocks", at(*held.blocks_at)),
        seen("share_of_pool", round(held.share, 4), "of the pool", at(*held.blocks_at)),
        seen("oldest_age_s", round(ledger.age_s(held.deferrals[0].since_ns), 1), "s", at(held.kept_at[0])),
        seen("oldest_fetch_s", round(ledger.age_s(began), 1), "s", at(first.fetching_at)),
        seen(
            "lost_fetches_reported_complete",
            len(ended),
            "fetches",
            at(*held.kept_at, *(r.fetch_ended_at for r in ended)),
        ),
        seen("running", sum(r.is_running for r in state.requests.values()), "requests", at(state.places.moved)),
    )
