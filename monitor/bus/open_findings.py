"""Reads where another agent left an engine: which findings are open, and the last batch that it received."""

from __future__ import annotations

import time
from typing import NamedTuple

from nats.js import JetStreamContext

from kvscope.monitor.bus.bus_config import BusConfig
from kvscope.monitor.bus.bus_connection import read_all
from kvscope.monitor.bus.bus_messages import finding_message
from kvscope.monitor.bus.bus_spool import BusSpool
from kvscope.monitor.bus.bus_subjects import events_stream, points_stream, subject_of
from kvscope.monitor.bus.fleet_fold import FleetFold
from kvscope.monitor.findings import Finding, Transition


class LeftBehind(NamedTuple):
    """Where an agent left an engine: its open findings, and the position (epoch, sequence) of its last point."""

    findings: list[Finding]
    epoch: int
    sequence: int


async def left_behind(streams: JetStreamContext, config: BusConfig, engine: str, spool: BusSpool) -> LeftBehind:
    """Return where the last agent left an engine, with position (0, -1) if no point has one.

    Raises NATS_ERRORS and sqlite3.Error.
    """
    fold = FleetFold()
    async for message in read_all(streams, points_stream(config.tenant), subject_of(config.tenant, "point", engine)):
        fold.take("point", message.body)
    point = fold.points.get(engine)
    epoch, _, sequence = (point.engine.position or "").partition("/") if point is not None else ("", "", "")
    findings = await open_on_bus(streams, config, engine, spool)
    if not (epoch.isdecimal() and sequence.isdecimal()):
        return LeftBehind(findings, 0, -1)
    return LeftBehind(findings, int(epoch), int(sequence))


async def open_on_bus(streams: JetStreamContext, config: BusConfig, engine: str, spool: BusSpool) -> list[Finding]:
    """Return the findings of an engine that fire according to the stream. `spool` will not send that they fire again.

    A finding that another one of the same place has replaced ends: it was on its way when its agent lost the lease, so
    no agent would ever resolve it.

    Raises NATS_ERRORS and sqlite3.Error.
    """
    fold = FleetFold()
    subject = f"{subject_of(config.tenant, 'finding', engine)}.*"
    async for message in read_all(streams, events_stream(config.tenant), subject):
        fold.take("finding", message.body)
    found = fold.open_findings(engine)
    for finding in found:
        spool.adopt(finding.id, engine)
    for finding in fold.replaced_findings(engine):
        spool.put([finding_message(Transition(finding, "resolved", time.time_ns()), config.agent)])
    return found
