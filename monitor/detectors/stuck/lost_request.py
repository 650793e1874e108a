"""stuck.lost-request: unfinished requests that are in none of the scheduler's queues.

The engine reports each by name (NOT_QUEUED) once it has missed it for some seconds. An engine that does not report
that still gives the lengths of its queues with each heartbeat: where the ledger has more unfinished requests at several
heartbeats in a row, each in another pass, some are lost, and those that have not moved since are the candidates. The
heartbeats of one pass count as one: the engine may report only at its end which requests it took from the queues.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, pairwise, takewhile

from ...base.text import clock_time, counted, duration, listed
from ...ledger.engine_ledger import EngineLedger
from ...ledger.heartbeat_history import QueueLength
from ...ledger.ledger_records import Point
from ...ledger.queue_state import Living
from ...ledger.records import RequestState
from ..advice import them
from ..detector import Settings, StreamDetector, Threshold
from ..judgement import Alternative, Judgement, Unless, seen

POINTS_AROUND_NS = 250_000_000
"""A heartbeat and the events before it reach the ledger within so long of one another."""


class LostRequest(StreamDetector[Judgement]):
    """Requests that the scheduler has lost.

    Sees: unfinished requests that are in none of the scheduler's queues.
    Confirmed when: the engine itself reports them as in no queue, or its audit no longer has them.
    Likely when: its queues were shorter than the number of unfinished requests at several heartbeats, each of another
    pass.
    Not when: a step in flight may still end them; a pass put them in its queue, or found them in its queue since.
    """

    code = "stuck.lost-request"
    severity = "error"
    title = "Unfinished requests are missing from the scheduler's queues"

    heartbeats = Threshold(
        5, "heartbeats", "events and heartbeats of a busy engine differ for one pass, not for so many in a row"
    )
    alternatives = (
        Alternative("events later than the heartbeat", "the same in several passes in a row"),
        Unless("an end that the stream missed", "the engine's own report of requests in no queue"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that no pass of the scheduler will reach."""
        if ledger.state.stopped_ns:
            return
        living = ledger.living()
        reported = [record for record in (*living.running, *living.waiting) if record.not_queued_ns]
        if reported:
            lost = [record for record in reported if not _may_be_in_a_step(ledger, record)]
            named = lost or reported
            since = ledger.wall(min(record.not_queued_ns for record in named))
            yield self._judged(ledger, named, len(named), since, exact=True, may_end=not lost)
            return
        count = round(settings(self.heartbeats))
        missing = self._missing(ledger, count)
        if missing > 0:
            since = list(ledger.beats.queue_lengths)[-count].at_ns
            candidates = _unmoved(ledger, living, since)
            if len(candidates) >= missing:
                named = candidates if len(candidates) == missing else []
                yield self._judged(ledger, named, missing, since, exact=False)

    def _missing(self, ledger: EngineLedger, heartbeats: int) -> int:
        """Return the least by which the ledger's unfinished requests exceeded the queues' at each of the last
        heartbeats.
        """
        beats = list(ledger.beats.queue_lengths)[-heartbeats:]
        if len(beats) < heartbeats or ledger.state.damaged or not ledger.points:
            return 0
        if _unfinished(ledger.points[-1]) <= beats[-1].requests:
            return 0
        since = beats[0].at_ns - POINTS_AROUND_NS
        points = list(takewhile(lambda point: point.at_ns >= since, reversed(ledger.points)))[::-1]
        return min(_fewest_unfinished(points, beat) - beat.requests for beat in beats)

    def _judged(
        self, ledger: EngineLedger, lost: list[RequestState], count: int, since: int, exact: bool, may_end: bool = False
    ) -> Judgement:
        """since: when they were in no queue at the latest. Before that a request may have run like any other. may_end:
        a step in flight may end them.
        """
        state, at = ledger.state, ledger.at
        blocks = sorted({block for record in lost for block in record.blocks})
        beat = state.heartbeat
        names = f" ({listed([record.id for record in lost])})" if lost else ""
        they_hold = "It holds" if count == 1 else "They hold"
        holds = f" {they_hold} {counted(len(blocks), 'block')}." if blocks else ""
        return self.finding(
            ledger,
            verdict="confirmed" if exact and not state.damaged else "likely",
            pending=may_end or not all(map(state.is_certain_request, lost)),
            since_ns=since,
            position=at(*(record.not_queued_at for record in lost), state.places.heartbeat),
            requests=tuple(record.id for record in lost),
            blocks=tuple(blocks),
            evidence=(
                seen("requests_lost", count, "requests", at(*(record.since_at for record in lost))),
                seen(
                    "queued_in_engine",
                    beat.running + beat.waiting if beat is not None else "not heard",
                    "requests",
                    at(state.places.heartbeat),
                ),
                seen("blocks_held", len(blocks), "blocks", at(state.places.pool)),
            ),
            explanation=(
                f"{counted(count, 'unfinished request')}{names} {'is' if count == 1 else 'are'} in none of the"
                f" scheduler's queues, since {clock_time(since)} at the latest"
                f" ({duration(max(0, ledger.now_ns - since) / 1e9)}): the scheduler will never reach"
                f" {'it' if count == 1 else 'them'}, and the client waits.{holds} The"
                " engine's other requests are not affected."
            ),
            numbers={"Abort it": f"Abort {them(count)}", "resend it": f"resend {them(count)}"},
            missing="" if exact else "the engine's own report of the requests in no queue, from a newer probe",
        )


def _may_be_in_a_step(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether a step that has not ended may give it its last token, though no queue has it any more."""
    launched = [step.since_ns for step in ledger.state.in_flight.values()]
    return record.is_running and any(since_ns <= record.not_queued_ns for since_ns in launched)


def _fewest_unfinished(points: list[Point], beat: QueueLength) -> int:
    """Return the ledger's unfinished requests at this heartbeat, without those whose end was not reported by then.

    A pass that waits for its step reports at the step's end which requests it had taken from the queues before.
    """
    counts = [_unfinished(point) for point in points if abs(point.at_ns - beat.at_ns) <= POINTS_AROUND_NS]
    if beat.in_step:
        reports = (
            _unfinished(before) - (report.finished_requests - before.finished_requests)
            for before, report in pairwise(points)
            if report.at_ns > beat.at_ns and report.steps > before.steps
        )
        counts.extend(islice(reports, 1))
    return min(counts, default=beat.requests)


def _unfinished(point: Point) -> int:
    return point.running + point.waiting


def _unmoved(ledger: EngineLedger, living: Living, since_wall_ns: int) -> list[RequestState]:
    """Return the requests that have neither moved nor progressed since then."""
    waiting = [record for record in living.waiting if ledger.wall(record.since_ns) < since_wall_ns]
    running = [
        record for record in living.running if ledger.wall(max(record.since_ns, record.progressed_ns)) < since_wall_ns
    ]
    return [*waiting, *running]
