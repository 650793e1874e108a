"""Reads where another agent left an engine: which findings are open, and the last batch that it received."""

from __future__ import annotations

import time
from typing import NamedTuple

from nats.js import JetStreamContext

from ..detectors.findings import Finding, Transition
from .bus_config import BusConfig
from .bus_connection import read_all
from .bus_messages import finding_message
from .bus_spool import BusSpool
from .bus_subjects import events_stream, pattern_of, points_stream, subject_of
from .fleet_fold import FleetFold
from .fleet_owners import FleetOwners


class LeftBehind(NamedTuple):
    """Where an agent left an engine: its open findings, and the position (epoch, sequence) of its last point."""

    findings: list[Finding]
    epoch: int
    sequence: int


async def left_behind(
    streams: JetStreamContext, config: BusConfig, engine: str, last: str, spool: BusSpool
) -> LeftBehind:
    """Return where an engine was left by the agent that had it last, with position (0, -1) if no point of it has one.

    `spool` will not send that the findings fire again. A finding that another one of the same place has replaced ends:
    it was on its way when its agent lost the lease, so no agent would ever resolve it. What other agents sent of the
    engine does not count. Raises NATS_ERRORS and sqlite3.Error.
    """
    fold = FleetFold(FleetOwners(fixed=last))
    subject = subject_of(config.tenant, "point", last, engine)
    async for message in read_all(streams, points_stream(config.tenant), subject):
        fold.take(message)
    subject = pattern_of(config.tenant, "finding", engine)
    async for message in read_all(streams, events_stream(config.tenant), subject):
        fold.take(message)
    found = fold.open_findings(engine)
    for finding in found:
        spool.adopt(finding.id, engine)
    for finding in fold.replaced_findings(engine):
        spool.put([finding_message(Transition(finding, "resolved", time.time_ns()), config.agent)])
    point = fold.points.get(engine)
    epoch, _, sequence = (point.engine.position or "").partition("/") if point is not None else ("", "", "")
    if not (epoch.isdecimal() and sequence.isdecimal()):
        return LeftBehind(found, 0, -1)
    return LeftBehind(found, int(epoch), int(sequence))
