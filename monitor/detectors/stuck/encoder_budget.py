"""stuck.encoder-budget: a request is passed over for room in the encoder's cache, at every step."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..advice import them
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s
from ..judgement import NO_ROOM, Judgement, Unless, seen
from ..leak.encoder_cache import hold_one_another
from .waiting_requests import overdue_requests, requests_text, since_text


class EncoderBudget(StreamDetector[Judgement]):
    """Requests that are passed over for the encoder.

    Sees: a request that the scheduler skips for lack of encoder room at every step of the pending period.
    Likely when: always, since the stream has neither the size of the item nor that of the encoder cache.
    Not when: several such requests hold the cache against one another (leak.encoder-cache).
    """

    code = "stuck.encoder-budget"
    severity = "error"
    title = "A request waits for room in the encoder cache"

    grace_s = Threshold(30, "s", "items of others leave the encoder's cache as soon as their prompts are computed")
    alternatives = (NO_ROOM, Unless("other requests keep the encoder cache full", "the cache's own contents"))

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests passed over for the encoder, unless they are leak.encoder-cache."""
        if hold_one_another(ledger):
            return
        living = ledger.living()
        encoder = [r for records in (living.running, living.waiting) for r in records if r.cause == Cause.ENCODER]
        yield from self._from_stream(ledger, settings, encoder)

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, passed_over: list[RequestState]
    ) -> Iterator[Judgement]:
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        late = overdue_requests(ledger, passed_over, lambda r: r.since_ns, ledger.looked_ns, grace_s)
        if late is None:
            return
        state, at, count = ledger.state, ledger.at, len(late.records)
        yield self.finding(
            ledger,
            pending=late.pending,
            since_ns=ledger.wall(late.since_ns),
            position=at(late.records[0].since_at),
            requests=late.ids,
            evidence=(
                seen("requests_waiting", count, "requests", at(*(record.since_at for record in late.records))),
                seen("longest_wait_s", round(late.age_s, 1), "s", at(late.records[0].since_at)),
                seen(
                    "times_passed_over",
                    late.records[0].times_passed_over,
                    "times, at the least",
                    at(late.records[0].passed_over_at),
                ),
                seen("blocks_free", state.free, "blocks", at(state.places.pool)),
                seen("last_step", state.last_step, "step", at(state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'is' if count == 1 else 'are'} skipped for lack of encoder room at every step,"
                f" {since_text(ledger, late)} ({duration(late.age_s)}), with {counted(state.free, 'block')} free: an"
                " image, video or sound in it is larger than the encoder cache, or other requests keep that cache full."
            ),
            numbers={"Abort it": f"Abort {them(count)}"},
            missing=(
                "the sizes of the item and of the encoder cache: the event stream has neither, the engine's log may"
            ),
        )
