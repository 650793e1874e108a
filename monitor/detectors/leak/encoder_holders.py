"""Requests that hold the encoder's cache against one another: shared by leak.encoder-cache and stuck.encoder-budget."""

from __future__ import annotations

from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState

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
