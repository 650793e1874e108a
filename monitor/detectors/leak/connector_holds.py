"""Blocks that a KV connector keeps, and the party whose report of completion is missing. Shared by the leak codes of
connectors.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.events.kinds import Holder
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Deferral, RequestState


class ConnectorHolds(NamedTuple):
    """Deferrals of ended requests by what the connector owes: that it has sent, or has fetched, their KV. `polled`:
    the engine asks the connector. `idle`: no request runs or waits.
    """

    sending: list[Deferral]
    fetching: list[Deferral]
    polled: bool
    idle: bool


def connector_holds(ledger: EngineLedger) -> ConnectorHolds:
    """Sort what is kept for the connector."""
    sending: list[Deferral] = []
    fetching: list[Deferral] = []
    requests = ledger.state.requests
    for deferral in ledger.state.deferrals.values():
        record = requests.get(deferral.request)
        # The ledger forgets a request once all of its blocks were detached: it has ended.
        if deferral.holder == Holder.CONNECTOR and (record is None or record.is_finished):
            (fetching if record is not None and record.fetching_ns else sending).append(deferral)
    if not (sending or fetching):
        return ConnectorHolds(sending, fetching, polled=False, idle=False)
    return ConnectorHolds(
        sending,
        fetching,
        polled=ledger.unpolled_s() < NOT_ASKED_S,
        idle=not any(record.is_running or record.is_waiting for record in requests.values()),
    )


NOT_ASKED_S: Final = 3.0
"""An engine asks in each pass, and heartbeats come once a second: after so long without, it does not ask."""


RESTART_ONLY = "Drain this engine before the pool is full, then restart it: only a restart frees the blocks."


KEPT_WONT_HELP = (
    "Lowering max_num_seqs or the load: live requests do not hold these blocks.",
    "A larger pool (gpu_memory_utilization): it also fills, only later.",
    "Resetting the prefix cache: it fails while these blocks are referenced.",
)


def connector_text(ledger: EngineLedger) -> str:
    """Name the connector in a sentence."""
    name = ledger.description.kv_connector
    return f"the KV connector ({name})" if name else "the KV connector"


def records_of(ledger: EngineLedger, deferrals: list[Deferral]) -> list[RequestState]:
    """Return the requests of the deferrals, as far as the ledger still has them."""
    requests = ledger.state.requests
    return [requests[deferral.request] for deferral in deferrals if deferral.request in requests]
