"""stuck.grammar: requests wait for a grammar that is neither compiled nor refused."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.outside_pace import outside_wait_limit
from kvscope.monitor.detectors.stuck.fetch_waits import could_report_until_ns
from kvscope.monitor.detectors.stuck.waiting_requests import (
    overdue_judgement,
    overdue_requests,
    requests_text,
    since_text,
)
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Cause, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import duration


class GrammarWait(Detector[Judgement]):
    """Requests that wait for a grammar that does not come."""

    code = "stuck.grammar"
    severity = "error"
    title = "Requests wait for a grammar that never becomes ready"
    requires = ("stream",)
    position = 260

    grace_s = Threshold(30, "s", "a grammar compiles in milliseconds, a very large one in seconds")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests whose grammar takes too long."""
        if ledger.has_stream:
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
            ledger,
            late,
            code=self.code,
            began_at=late.records[0].since_at,
            unseen="whether the compiler still works on it: a stack of the process (py-spy dump --pid PID)",
            evidence=(
                Evidence(
                    "requests_waiting", count, "requests", position=at(*(record.since_at for record in late.records))
                ),
                Evidence("oldest_wait_s", round(late.age_s, 1), "s", position=at(late.records[0].since_at)),
                Evidence("last_step", ledger.state.last_step, "step", position=at(ledger.state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'waits for its grammar' if count == 1 else 'wait for their grammars'},"
                f" {since_text(ledger, late)} ({duration(late.age_s)}), although the scheduler reaches them. Either"
                " compilation failed and the engine missed that, or the compiler hangs or still runs."
            ),
            do_now=(
                f"Abort {'it' if count == 1 else 'them'} (close the connection), and search the engine's log for a"
                " grammar compiler error at about that time.",
                "Compile the schema or regular expression separately: an invalid one fails there too.",
            ),
            change=(
                "vLLM: upgrade to a release in which a grammar that fails to compile ends its request with an error"
                " (PR #45012).",
                "Accept only schemas that are known to compile, and bound their repeats.",
                'Try another grammar backend (vLLM: --structured-outputs-config \'{"backend": "guidance"}\').',
            ),
            wont_help=(
                "A larger pool, or a lower load: the request waits for no block.",
                "Resending the same request: it waits for the same grammar.",
            ),
        )
