"""Reads which findings of an engine are open on the bus: what an agent that begins with the engine goes on with."""

from __future__ import annotations

from nats.js import JetStreamContext

from kvscope.monitor.bus.bus_connection import read_all
from kvscope.monitor.bus.bus_spool import BusSpool
from kvscope.monitor.bus.bus_subjects import events_stream, subject_of
from kvscope.monitor.bus.fleet_fold import FleetFold
from kvscope.monitor.findings import Finding


async def open_on_bus(streams: JetStreamContext, tenant: str, engine: str, spool: BusSpool) -> list[Finding]:
    """Return the findings of an engine that fire by the stream's word; `spool` will not send that they fire again.

    Raises NATS_ERRORS and sqlite3.Error.
    """
    fold = FleetFold()
    async for message in read_all(streams, events_stream(tenant), f"{subject_of(tenant, 'finding', engine)}.*"):
        fold.take("finding", message.body)
    found = fold.open_findings(engine)
    for finding in found:
        spool.adopt(finding.id, engine)
    return found
