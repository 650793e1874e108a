"""leak.encoder-cache: requests that wait fill the encoder's cache, so that none of them goes on."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import clock_time, counted, duration
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import NO_ROOM, Judgement, Unless, seen

ENCODER_CAUSE = int(Cause.ENCODER)  # comparing with an IntEnum's member costs several times as much, for every request


def hold_one_another(ledger: EngineLedger) -> list[RequestState]:
    """Return the requests skipped for the encoder, if there are several and none has advanced since, or else an empty
    list.
    """
    living = ledger.living()
    passed_over = [r for records in (living.waiting, living.running) for r in records if r.cause == ENCODER_CAUSE]
    if len(passed_over) < 2 or not ledger.state.free:
        return []
    since_ns = max(record.since_ns for record in passed_over)
    return passed_over if all(r.progressed_ns <= since_ns for r in ledger.state.requests.values()) else []


class EncoderCache(StreamDetector[Judgement]):
    """Requests that wait hold the encoder cache against one another.

    Sees: several requests skipped for the encoder at each pass, and no request has advanced since, with KV blocks free.
    Likely when: this lasts for the pending period. The stream has no event of the encoder cache itself.
    Not when: one request alone is skipped (stuck.encoder-budget), or any request advances.
    """

    code = "leak.encoder-cache"
    severity = "error"
    title = "Waiting requests block each other in the encoder cache"

    grace_s = Threshold(
        30, "s", "the encoder's work on a long video takes seconds, in which no other request may advance"
    )
    alternatives = (NO_ROOM, Unless("one item larger than the encoder cache", "the cache's own contents"))

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that hold the encoder's cache against one another."""
        passed_over = hold_one_another(ledger)
        if not passed_over:
            return
        state, at = ledger.state, ledger.at
        last = max(passed_over, key=lambda record: record.since_ns)
        most = max(passed_over, key=lambda record: record.times_passed_over)
        since_ns = last.since_ns
        # Until when they could have advanced: a scheduler that makes no pass leaves no request out.
        age, grace = (ledger.looked_ns - since_ns) / 1e9, settings(self.grace_s)
        if age < grace / 2:
            return
        yield self.finding(
            ledger,
            pending=age < grace
            or (ledger.looked_ns - state.lost_ns) / 1e9 < grace
            or not all(map(state.is_certain_request, passed_over)),
            since_ns=ledger.wall(since_ns),
            position=at(last.since_at),
            requests=tuple(record.id for record in passed_over),
            blocks=tuple(sorted(set().union(*(record.blocks for record in passed_over)))),
            evidence=(
                seen("requests_passed_over", len(passed_over), "requests", at(last.since_at)),
                seen(
                    "passed_over_running",
                    sum(record.is_running for record in passed_over),
                    "requests",
                    at(last.since_at),
                ),
                seen("no_progress_s", round(age, 1), "s", at(last.since_at)),
                seen("times_passed_over", most.times_passed_over, "times, at the least", at(most.passed_over_at)),
                seen("blocks_free", state.free, "blocks", at(state.places.pool)),
            ),
            explanation=(
                f"{counted(len(passed_over), 'request')} are passed over for the encoder at every pass, and since"
                f" {clock_time(ledger.wall(since_ns))} ({duration(age)}) no request has advanced, with"
                f" {counted(state.free, 'block')} of KV free. These requests fill the encoder cache themselves: each"
                " waits for room that another of them holds."
            ),
            numbers={"the last of them": f"{passed_over[-1].id}, the last of them"},
            missing="what the encoder cache holds: the event stream does not have it, the engine's log may",
        )
