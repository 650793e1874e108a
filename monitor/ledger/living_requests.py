"""The requests that have not ended, sorted by where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvscope.monitor.events.kinds import FIRST_FINISHED, Cause, Status
from kvscope.monitor.state.records import RequestState

_IS_RUNNING: Final = int(Status.RUNNING)
_IS_RECEIVED: Final = int(Status.RECEIVED)
_FIRST_ENDED: Final = int(FIRST_FINISHED)
_OUTSIDE: Final = frozenset(
    int(status)
    for status in (
        Status.WAITING_FOR_REMOTE_KVS,
        Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        Status.WAITING_FOR_STREAMING_REQ,
    )
)
_IS_BEHIND: Final = int(Cause.BEHIND_HEAD)
_OUTSIDE_CAUSES: Final = frozenset((int(Cause.REMOTE_KV), int(Cause.GRAMMAR), int(Cause.STREAMING_INPUT)))


class Living(NamedTuple):
    """The requests that have not ended, each list in the order of arrival."""

    received: list[RequestState]
    waiting: list[RequestState]
    running: list[RequestState]


def sort_living(requests: Iterable[RequestState]) -> Living:
    """Sort the requests that have not ended."""
    found = Living([], [], [])
    for record in requests:
        status = record.status
        if status == _IS_RUNNING:
            found.running.append(record)
        elif _IS_RECEIVED < status < _FIRST_ENDED:
            found.waiting.append(record)
        elif status == _IS_RECEIVED:
            found.received.append(record)
    return found


def is_outside(record: RequestState) -> bool:
    """Return whether it waits for something outside the scheduler."""
    return record.status in _OUTSIDE


def was_found_behind(record: RequestState) -> bool:
    """Return whether what it waited for has come, and the scheduler has found it behind the head since."""
    return bool(record.ready_ns) and record.cause == _IS_BEHIND and record.passed_over_at > record.ready_at


def was_left_out(record: RequestState, head: RequestState) -> bool:
    """Return whether the scheduler tries `head` though this one is as urgent and is ready: it was before the head
    arrived, or came before the head and was ready when the head was last refused. Not if the engine reports since that
    it stands behind the head: some releases turn around the order of requests that they pass over.
    """
    if not record.ready_ns or head.preemptions or head.priority < record.priority:
        return False
    if was_found_behind(record):
        return False
    came_before = (record.arrived_ns, record.number) < (head.arrived_ns, head.number)
    return head.arrived_ns > record.ready_ns or (came_before and head.passed_over_at > record.ready_at)


def refused_last(requests: Iterable[RequestState]) -> RequestState | None:
    """Return the waiting request that the scheduler passed over last. One that it has since sent to wait for something
    outside holds back no other, and one that was passed over because it stands behind another is not the first.
    """
    refused = [r for r in requests if r.times_passed_over and r.is_waiting and r.cause not in _OUTSIDE_CAUSES]
    return max(refused, key=lambda r: (r.cause != _IS_BEHIND, r.since_ns), default=None)
