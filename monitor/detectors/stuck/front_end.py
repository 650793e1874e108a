"""stuck.front-end: requests never reach the scheduler. Needs RECEIVED, which an engine says if the stream sees its
front end too; of others nothing is said here.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.waiting_requests import Living, judged, overdue, requests, since_in_words
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import counted, duration

FRONT_END = "stuck.front-end"


def judge(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    """Who was received, and never arrived, though the engine would have taken it in."""
    waiting = [record for record in living.received if not record.client_gone_ns]
    if not waiting:
        return
    state, at, beat = ledger.state, ledger.at, ledger.state.heartbeat
    free_ns = ledger.looked_ns
    if beat is not None and not (beat.running or beat.waiting or state.in_flight):
        free_ns = max(free_ns, beat.at_ns)  # it has nothing else to do
    late = overdue(waiting, lambda r: r.received_ns, free_ns, settings(FRONT_END, "grace_s"))
    if late is None:
        return
    count, known = len(late.records), len(living.waiting) + len(living.running)
    yield judged(
        ledger,
        late,
        code=FRONT_END,
        began_at=late.records[0].arrived_at,
        evidence=(
            Evidence("never_arrived", count, "requests", position=at(*(record.arrived_at for record in late.records))),
            Evidence("oldest_s", round(late.age_s, 1), "s", position=at(late.records[0].arrived_at)),
            Evidence(
                "front_end_in_flight",
                beat.front_end_in_flight if beat else "not heard",
                "requests",
                position=at(state.places.heartbeat),
            ),
            Evidence("at_the_scheduler", known, "requests", position=at(state.places.moved)),
            Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
        ),
        explanation=(
            f"{requests(late)} {'was' if count == 1 else 'were'} taken in by the front end,"
            f" {since_in_words(ledger, late)} ({duration(late.age_s)}), and never arrived at the scheduler, which goes"
            f" on and has {counted(known, 'request')}. Whoever asked waits for an answer that nobody computes."
        ),
        do_now=(
            "Close the connection and send it again; if that one arrives, the first was lost on the way.",
            "If none arrives, restart the front end (the API server), and look at it first: py-spy dump --pid PID.",
        ),
        change=(
            "Give clients a timeout for the first token and one retry: a request that is lost on the way does not come"
            " back by itself.",
            "vLLM: upgrade (#51921); with several API servers, compare with --api-server-count 1.",
        ),
        wont_help=(
            "A larger pool, or a higher max_num_seqs: the scheduler does not know of the request.",
            "The engine's own figures: Running and Waiting do not count it.",
        ),
    )
