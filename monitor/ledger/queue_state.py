"""The requests that have not ended, and what a head of the waiting queue holds back.

A head holds back the requests behind it that would fit into the free blocks when it does not. That is noted at most
twice a second, each time for a pass of the scheduler: between passes no request can be admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice, pairwise
from typing import Final, NamedTuple

from ..contract.description import EngineDescription
from ..contract.kinds import FIRST_FINISHED, Cause, Status
from .engine_state import EngineState
from .records import RequestState

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
    """Return whether a request waits for something outside the scheduler."""
    return record.status in _OUTSIDE


def was_found_behind(record: RequestState) -> bool:
    """Return whether the scheduler has passed over a ready request since, as one that stands behind the head."""
    return bool(record.ready_ns) and record.cause == _IS_BEHIND and record.passed_over_at > record.ready_at


def was_left_out(record: RequestState, head: RequestState) -> bool:
    """Return whether the scheduler tries `head` although this request is ready and as urgent.

    That is so if it was ready before the head arrived, or if it arrived first and was ready when the head was last
    refused. It is not so once the engine reports that it stands behind the head: some releases reverse the order of
    the requests that they pass over.
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


NOTED_EVERY_NS: Final = 500_000_000
LONGEST_PASS_NS: Final = 2_000_000_000
"""Heartbeats come each second: an engine that is known to have made no pass for longer than two of them was paused or
stalled, or computed a longer step.
"""
MAX_NOTED: Final = 4_096
MOST_ASKED_BEHIND: Final = 256
"""The most requests behind a head that are examined for whether they would fit."""


def blocks_to_run(state: EngineState, description: EngineDescription, record: RequestState) -> int:
    """Return how many blocks a waiting request must get at once.

    A failed allocation names fewer: it does not count prefix hits, which take blocks too. The output of a preempted
    request is computed again with its prompt. With layers that keep only a window of it, only the engine can determine
    how many blocks that takes.
    """
    needed = max(record.blocks_needed, record.blocks_to_admit)
    if state.block_size and all(group.kind == "full_attention" for group in description.groups):
        needed = max(needed, state.blocks_of_tokens(record))
    return needed


def is_short_of_blocks(state: EngineState, head: RequestState) -> bool:
    """Whether the head of the queue was refused for blocks that the pool could have."""
    refused = head.cause == Cause.KV_BLOCKS and head.blocks_needed > head.blocks_free_then
    return refused and head.blocks_needed <= state.usable


def requests_behind(living: Living, head: RequestState) -> list[RequestState]:
    """Return those that wait because `head` does. A ready one may wait for another reason: that no pass queued it."""
    others = (record for record in living.waiting if record is not head and not record.ready_ns)
    return [record for record in others if not is_outside(record) and not was_left_out(record, head)]


def fitting_together(
    state: EngineState, description: EngineDescription, behind: Iterable[RequestState], running: int
) -> list[RequestState]:
    """Return those of `behind` that would fit together into the free blocks and the places of a step."""
    found: list[RequestState] = []
    room = state.free
    places = description.max_num_seqs - running if description.max_num_seqs else MOST_ASKED_BEHIND
    for record in islice(behind, MOST_ASKED_BEHIND):
        needed = blocks_to_run(state, description, record) - len(record.blocks)
        if len(found) < places and 0 < needed <= room:
            room -= needed
            found.append(record)
    return found


class QueueMoment(NamedTuple):
    """The queue after a pass (the engine's monotonic clock). held_back: requests that the head held back and that would
    have fitted together, 0 with no such head. present: all that waited or ran.
    """

    at_ns: int
    present: int
    held_back: int = 0
    head: str = ""
    needed: int = 0
    free: int = 0
    refused_at: int = -1


class HeldBackTime(NamedTuple):
    """The cost of heads of the queue in a window. Seconds in which one held others back, of requests that it held back,
    and of all requests.
    """

    since: QueueMoment
    worst: QueueMoment
    """With the most requests held back, the latest of these."""
    heads: tuple[str, ...]
    seconds: float
    lost_s: float
    present_s: float
    span_s: float


class HeldBackQueue:
    """The moments of one epoch. A loss ends the window: who waits and what is free may be wrong after it."""

    def __init__(self) -> None:
        self._moments: deque[QueueMoment] = deque(maxlen=MAX_NOTED)
        self._held_ns = 0

    def note(
        self,
        at_ns: int,
        state: EngineState,
        description: EngineDescription,
        living: Living,
        head: RequestState | None,
    ) -> None:
        """Note the queue as the pass at `at_ns` left it."""
        if state.damaged:
            self._moments.clear()
        elif not self._moments or at_ns - self._moments[-1].at_ns >= NOTED_EVERY_NS:
            present = len(living.waiting) + len(living.running)
            moment = QueueMoment(at_ns, present)
            if head is not None and is_short_of_blocks(state, head):
                behind = requests_behind(living, head)
                fitting = len(fitting_together(state, description, behind, len(living.running)))
                shortage = (head.blocks_needed, head.blocks_free_then, head.refused_at) if fitting else (0, 0, -1)
                moment = QueueMoment(at_ns, present, fitting, head.id if fitting else "", *shortage)
            self._held_ns = at_ns if moment.held_back else self._held_ns
            self._moments.append(moment)

    def over(self, window_s: float, longest_pass_s: float) -> HeldBackTime | None:
        """Return what was lost in the last `window_s`, or in as much of it as is known, or None if nothing."""
        if not self._moments or not self._held_ns:
            return None
        last_ns = self._moments[-1].at_ns
        begin_ns = last_ns - window_s * 1e9
        if self._held_ns < begin_ns:
            return None
        known_s = (last_ns - self._moments[0].at_ns) / 1e9
        most_ns = max(LONGEST_PASS_NS, longest_pass_s * 1e9)
        pairs = [
            (one, min(after.at_ns - one.at_ns, most_ns) / 1e9)
            for one, after in pairwise(self._moments)
            if one.at_ns >= begin_ns
        ]
        held = [(one, lasted_s) for one, lasted_s in pairs if one.held_back]
        if not held:
            return None
        return HeldBackTime(
            since=held[0][0],
            worst=max((one for one, _ in held), key=lambda one: (one.held_back, one.at_ns)),
            heads=tuple(dict.fromkeys(one.head for one, _ in held)),
            seconds=sum(lasted_s for _, lasted_s in held),
            lost_s=sum(lasted_s * one.held_back for one, lasted_s in held),
            present_s=sum(lasted_s * one.present for one, lasted_s in pairs),
            span_s=min(window_s, known_s),
        )
