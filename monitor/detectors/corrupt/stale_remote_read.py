"""corrupt.stale-remote-read: blocks were read from another engine after their lease had ended."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted
from ...ledger.engine_ledger import EngineLedger
from ..counted_events import counted_events
from ..detector import FromSamples, Settings
from ..judgement import Evidence, Judgement, TextJudgement
from ..written.written_view import TextDetector, WrittenView, quotes


class StaleRemoteRead(TextDetector):
    """A read of blocks that may be another request's by then.

    Sees: a line by which the other engine used blocks that this engine had released at the end of their lease.
    Likely when: always, since nothing shows whether the blocks were in use again by then.
    """

    code = "corrupt.stale-remote-read"
    severity = "critical"
    title = "Another engine read blocks after their lease had ended"

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield fetches by a decode worker of blocks that the prefill side had released."""
        lines = view.lines("stale_read")
        if not lines:
            yield from self._read_after_release(view)
            return
        yield view.finding(
            self.code,
            lines[0],
            evidence=(Evidence("reads", view.reported.count("stale_read"), "lines", "log"), *quotes(lines)),
            explanation=(
                "The other engine used blocks of a request that this engine had released: their lease had ended, and by"
                " then they may hold another request's KV. The client gets status 200 and an answer that may be wrong."
            ),
            missing="whether the blocks had been reused by then: the event stream of a probe on the prefill side",
        )

    def _read_after_release(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield leases that ended unfetched, in a report of wrong answers or of reads that came after."""
        released = view.lines("lease_expired")
        told = [*view.phrases("read_late"), *view.phrases("wrong_output", "kv_corrupted")]
        if not released or not told:
            return
        yield view.finding(
            self.code,
            released[0],
            evidence=(
                Evidence("expired_leases", view.reported.count("lease_expired"), "lines", "log"),
                *quotes([*released[:2], *told[:2]]),
            ),
            explanation=(
                "The sending side released the blocks of a finished request before they had been fetched, and the"
                " report names wrong answers or a later read. What is read then may be another request's KV, with"
                " status 200. Wrong answers from another cause, such as a kernel or a layout that differs between the"
                " sides, look the same."
            ),
            missing="a fetch of the same request after its release: both sides' logs at that time",
        )


class StaleRemoteReadFromCounter(FromSamples, StaleRemoteRead):
    """Reads after the end of a lease, by the engine's own counter.

    Sees: notifications of completed reads for requests whose leases had expired.
    Likely when: always, since the counter does not show whether the blocks had been used again by then.
    """

    recurs = True

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield what the engine counted."""
        late = counted_events(ledger.samples, "late_reads", settings)
        if late is None:
            return
        expired = ledger.samples[-1].expired_leases
        yield self.finding(
            ledger,
            since_ns=late.since_ns(),
            position=late.last.position,
            evidence=(
                *late.evidence("reads"),
                *((Evidence("expired_leases", expired, "leases", late.last.source),) if expired else ()),
            ),
            explanation=(
                f"The engine counted {counted(late.number, 'notification')} of completed reads {late.when()} that came"
                f" after the request's lease had expired{late.of_requests()}. The other engine read blocks that were"
                " released, or about to be, and that may hold another request's KV by then. The client gets status 200"
                " and an answer that may be wrong. A read that ended in time, with a notification that came late,"
                " counts as well."
            ),
            missing="whether the blocks had been reused by then: the event stream of a probe on the prefill side",
        )
