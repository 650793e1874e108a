"""The ledger's record of the recent past: points of the pool and the queues after a batch, and the size of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from kvscope.monitor.events.description import EngineDescription
from kvscope.monitor.events.kinds import FIRST_FINISHED, Status
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.ledger.fragmentation import unused_by_all
from kvscope.monitor.ledger.ledger_records import Point, Position
from kvscope.monitor.state.engine_state import EngineState


def point_now(
    state: EngineState,
    description: EngineDescription,
    at_ns: int,
    position: Position,
    waiting_by: Mapping[int, int],
    balance: Balance,
) -> Point:
    """Return the point at wall time `at_ns`. waiting_by: waiting requests by the cause of their wait."""
    totals = state.totals
    statuses = Counter([record.status for record in state.requests.values()])
    running = statuses[Status.RUNNING]
    waiting = sum(count for status, count in statuses.items() if Status.RECEIVED < status < FIRST_FINISHED)
    return Point(
        at_ns=at_ns,
        balance=balance,
        running=running,
        waiting=waiting - running,
        finished_requests=sum(totals.finished.values()),
        preemptions=sum(totals.preemptions.values()),
        computed_tokens=totals.computed_tokens,
        output_tokens=totals.output_tokens,
        allocation_failures=totals.allocation_failures,
        steps=totals.steps,
        waiting_by=tuple(waiting_by.items()),
        limits=tuple(totals.limits.items()),
        unused_tokens=-1 if (unused := unused_by_all(state, description)) is None else unused,
        position=position,
    )


def thinned_points(points: Iterable[Point], every_ns: int) -> list[Point]:
    """Return the points that are at least `every_ns` after the one returned before."""
    kept: list[Point] = []
    for point in points:
        if not kept or point.at_ns - kept[-1].at_ns >= every_ns:
            kept.append(point)
    return kept


BATCH_OVERHEAD: Final = 1_500
"""Bytes of a batch's own objects: the struct, its numbers and names, and three views of the frame."""


def batch_bytes(batch: Batch) -> int:
    """Return about how many bytes a batch takes in memory."""
    return BATCH_OVERHEAD + len(batch.runs) + len(batch.args) + len(batch.ids)
