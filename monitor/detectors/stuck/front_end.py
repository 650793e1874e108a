"""stuck.front-end: requests never reach the scheduler.

Needs RECEIVED, which kvscope's own engine reports, and the probe from vLLM's API server processes on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.waiting_requests import (
    overdue_judgement,
    overdue_requests,
    requests_text,
    since_text,
)
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import Living
from kvscope.monitor.text import counted, duration


class FrontEndLoss(Detector[Judgement]):
    """Requests that were received and never arrived at the scheduler."""

    code = "stuck.front-end"
    severity = "error"
    title = "Requests reach the front end but not the scheduler"
    requires = ("stream",)
    position = 295

    grace_s = Threshold(
        5, "s", "from the front end to the scheduler a request takes a pass, with a prompt of many tokens some more"
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that were received and never arrived."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings, ledger.living())

    def _from_stream(self, ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
        """Yield requests that were received and never arrived, though the engine would have admitted them."""
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
            ledger,
            late,
            code=self.code,
            began_at=late.records[0].arrived_at,
            unseen="whether the front end still tokenizes it or loads its images: a stack of the API server's process",
            evidence=(
                Evidence(
                    "requests_not_arrived",
                    count,
                    "requests",
                    position=at(*(record.arrived_at for record in late.records)),
                ),
                Evidence("oldest_received_s", round(late.age_s, 1), "s", position=at(late.records[0].arrived_at)),
                Evidence(
                    "front_end_in_flight",
                    beat.front_end_in_flight if beat else "not heard",
                    "requests",
                    position=at(state.places.heartbeat),
                ),
                Evidence("requests_in_scheduler", known, "requests", position=at(state.places.moved)),
                Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
            ),
            explanation=(
                f"{requests_text(late)} {'was' if count == 1 else 'were'} received by the front end,"
                f" {since_text(ledger, late)} ({duration(late.age_s)}), but never reached the scheduler, which keeps"
                f" running and has {counted(known, 'request')}. The client waits for a request that the scheduler"
                " never received."
            ),
            do_now=(
                "Close the connection and resend the request. If the second one arrives, the first was lost on the"
                " way.",
                "If none arrives, dump the stacks of the front end (the API server) with py-spy dump --pid PID,"
                " then restart it.",
            ),
            change=(
                "Give clients a timeout for the first token and one retry: a lost request does not return by itself.",
                "vLLM: upgrade (#51921); with several API servers, compare with --api-server-count 1.",
            ),
            wont_help=(
                "A larger pool, or a higher max_num_seqs: the scheduler does not know the request.",
                "The engine's own metrics: Running and Waiting do not count it.",
            ),
        )
