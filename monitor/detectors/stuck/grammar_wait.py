"""stuck.grammar: requests wait for a grammar that is neither compiled nor refused."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import duration
from ...contract.kinds import Cause, Status
from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import RequestState
from ..advice import them
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import outside_wait_limit
from ..judgement import Alternative, Judgement, Unless, seen
from .waiting_requests import could_report_until_ns, overdue_judgement, overdue_requests, requests_text, since_text


class GrammarWait(StreamDetector[Judgement]):
    """Requests that wait for a grammar that does not come.

    Sees: requests that the scheduler reaches and that wait for their grammar far longer than others did.
    Likely when: always, since the compiler may still work on it.
    Not when: the grammar is there, and the request waits for something else.
    """

    code = "stuck.grammar"
    severity = "error"
    title = "Requests wait for a grammar that never becomes ready"

    grace_s = Threshold(30, "s", "a grammar compiles in milliseconds, a very large one in seconds")
    alternatives = (
        Alternative("no place in the batch", "the scheduler reached the request and found no grammar"),
        Unless("a compiler that is still running", "a stack of the process"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests whose grammar takes too long."""
        waiting = ledger.living().waiting
        # With another cause its grammar is there, and the scheduler has not reached the request.
        grammars = [
            record
            for record in waiting
            if record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and record.cause == Cause.GRAMMAR
        ]
        if grammars:
            yield from self._from_stream(ledger, settings, grammars)

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, waiting: list[RequestState]
    ) -> Iterator[Judgement]:
        history = ledger.outside_waits.grammars
        limits = {r.number: outside_wait_limit(ledger, settings, history, self.grace_s, r.arrived_ns) for r in waiting}
        late = overdue_requests(
            ledger,
            waiting,
            lambda r: max(r.since_ns, limits[r.number].still_since_ns),
            could_report_until_ns(ledger),
            lambda r: limits[r.number].allowed_s,
        )
        if late is None:
            return
        at, count = ledger.at, len(late.records)
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=late.records[0].since_at,
            unseen="whether the compiler still works on it: a stack of the process (py-spy dump --pid PID)",
            evidence=(
                seen("requests_waiting", count, "requests", at(*(record.since_at for record in late.records))),
                seen("oldest_wait_s", round(late.age_s, 1), "s", at(late.records[0].since_at)),
                seen("last_step", ledger.state.last_step, "step", at(ledger.state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'waits for its grammar' if count == 1 else 'wait for their grammars'},"
                f" {since_text(ledger, late)} ({duration(late.age_s)}), although the scheduler reaches them. Either"
                " compilation failed and the engine missed that, or the compiler hangs or still runs."
            ),
            numbers={"Abort it": f"Abort {them(count)}"},
        )
