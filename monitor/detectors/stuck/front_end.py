"""stuck.front-end: requests never reach the scheduler.

Needs RECEIVED, which kvscope's own engine reports, and the probe from vLLM's API server processes on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration
from ...ledger.engine_ledger import EngineLedger
from ..detector import Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s
from ..judgement import NO_WORK, Judgement, Unless, seen
from .waiting_requests import overdue_judgement, overdue_requests, requests_text, since_text


class FrontEndLoss(StreamDetector[Judgement]):
    """Requests that were received and never arrived at the scheduler.

    Sees: requests that the front end received and the scheduler, which makes passes, does not have.
    Likely when: always, since after the pending period the front end may still tokenize a large prompt or load images.
    Not when: the client has gone.
    """

    code = "stuck.front-end"
    severity = "error"
    title = "Requests reach the front end but not the scheduler"

    grace_s = Threshold(
        5, "s", "from the front end to the scheduler a request takes a pass, with a prompt of many tokens some more"
    )
    alternatives = (NO_WORK, Unless("input processing of a large prompt", "a stack of the front end"))

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that were received and never arrived."""
        living = ledger.living()
        waiting = [record for record in living.received if not record.client_gone_ns]
        if not waiting:
            return
        state, at, beat = ledger.state, ledger.at, ledger.state.heartbeat
        free_ns = ledger.looked_ns
        if beat is not None and not (beat.running or beat.waiting or state.in_flight):
            free_ns = max(free_ns, beat.at_ns)  # it has nothing else to do
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        late = overdue_requests(ledger, waiting, lambda r: r.received_ns, free_ns, grace_s)
        if late is None:
            return
        count, known = len(late.records), len(living.waiting) + len(living.running)
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=late.records[0].arrived_at,
            unseen="whether the front end still tokenizes it or loads its images: a stack of the API server's process",
            evidence=(
                seen("requests_not_arrived", count, "requests", at(*(record.arrived_at for record in late.records))),
                seen("oldest_received_s", round(late.age_s, 1), "s", at(late.records[0].arrived_at)),
                seen(
                    "front_end_in_flight",
                    beat.front_end_in_flight if beat else "not heard",
                    "requests",
                    at(state.places.heartbeat),
                ),
                seen("requests_in_scheduler", known, "requests", at(state.places.moved)),
                seen("last_step", state.last_step, "step", at(state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'was' if count == 1 else 'were'} received by the front end,"
                f" {since_text(ledger, late)} ({duration(late.age_s)}), but never reached the scheduler, which keeps"
                f" running and has {counted(known, 'request')}. The client waits for a request that the scheduler never"
                " received."
            ),
        )
