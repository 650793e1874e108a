"""What harms the clients of an engine, by facts alone: who suffers, since when. Nothing here knows a cause.

CLIENT_HARMS defines each harm once. A request that waits for something outside the scheduler (KV, a grammar, its next
input) or whose engine is paused is not harmed by the scheduler. Times are on the engine's monotonic clock, and count
until the scheduler last went over its queue: what an engine does not do while it computes a step is no harm to one
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest
from typing import Final, NamedTuple

from ..contract.kinds import Cause, EngineMode
from .engine_ledger import EngineLedger
from .first_token_pace import SLOWER
from .queue_state import blocks_to_run, is_outside
from .records import RequestState


class Harm(NamedTuple):
    """A harm: its definition, what it is measured in, and why it is one."""

    name: str
    definition: str
    unit: str
    reason: str


CLIENT_HARMS: Final = (
    Harm(
        "overtaken",
        "waits while requests that arrived later are admitted",
        "s since the first of them that is not more urgent, and how many there are",
        "first come, first served is what a client expects; priorities change the order, and excuse a few only",
    ),
    Harm(
        "no progress",
        "runs, and has had no token computed",
        "s since the last one",
        "a client in the middle of its answer sees it stop",
    ),
    Harm(
        "computed again",
        "runs, and computes tokens that it had computed, with no preemption in between",
        "s since it had its furthest token",
        "its steps take the engine's time, and it comes no nearer to its end",
    ),
    Harm(
        "unserved",
        "waits and the scheduler passes it over, though nothing runs, or for a reason that the queues contradict",
        "s since the last step or its arrival, whichever is later",
        "an engine that does nothing has no reason to let a client wait",
    ),
    Harm(
        "held by no one who progresses",
        "blocks in use that no request which gets tokens has in its table, and no transfer, pin or session keeps",
        "blocks that have been so for a time, as a share of the pool",
        "the pool is smaller for every client, and nobody gains by it",
    ),
    Harm(
        "waits beyond the usual",
        f"has no first token yet, for {SLOWER:g} times as long as 95 % of this engine's requests usually wait",
        "s since its arrival, beside the usual 95th percentile",
        "its client compares it with what the engine did before. It has no code: a scheduler that treats one request"
        " worse shows in the harms above, and what is left is more load than the engine can serve, which is no fault of"
        " it. `monitor explain request` and the page tell it of a request, and `slow` in the view of an engine of all",
    ),
)
MOST_ASKED_OVERTAKEN: Final = 64
"""The most waiting requests that are compared with all that were admitted: those that arrived first."""
_LACKS: Final = frozenset((int(Cause.LORA), int(Cause.ENCODER), int(Cause.CONNECTOR)))
"""What one request lacks while it stands in the queue. Engines tell it of the first of them alone: where any request
lacked it, one of which no reason was told may lack it too, or have lacked it until one was.
"""
LEFT_OUT_FOR: Final = _LACKS | {int(Cause.REMOTE_KV), int(Cause.GRAMMAR), int(Cause.STREAMING_INPUT)}
"""Reasons of one request alone: the scheduler goes on to the next, which is no disorder of its queue."""
_NO_REASON: Final = frozenset((int(Cause.NONE), int(Cause.NEW), int(Cause.UNKNOWN)))


class Harmed(NamedTuple):
    """A request that is harmed, since when, and where that began in the stream."""

    record: RequestState
    since_ns: int
    at: int
    overtakers: int = 0
    """Requests that arrived later and were admitted first."""
    alike: int = 0
    """Of these, requests that are not more urgent."""


def overtaken(ledger: EngineLedger) -> Iterator[Harmed]:
    """Yield the waiting requests that others have overtaken, as far as the ledger keeps those that have ended."""
    waiting = [record for record in _in_queue(ledger) if record.cause not in LEFT_OUT_FOR]
    if not waiting:
        return
    others = (*ledger.state.requests.values(), *ledger.ended)
    lacks = any(each.cause in _LACKS or not _LACKS.isdisjoint(each.waited_ns) for each in others)
    if lacks:
        waiting = [record for record in waiting if record.cause not in _NO_REASON]
    waiting = nsmallest(MOST_ASKED_OVERTAKEN, waiting, key=lambda record: record.arrived_ns)
    first_ns = waiting[0].arrived_ns if waiting else 0
    admitted = [each for each in others if each.admitted_ns and each.arrived_ns > first_ns]
    for record in waiting if admitted else ():
        began_ns = record.since_ns if lacks else _in_queue_since(record)
        over = [each for each in admitted if each.arrived_ns > record.arrived_ns and each.admitted_ns > began_ns]
        if over:
            alike = [each for each in over if each.priority >= record.priority]
            since_ns = min(each.admitted_ns for each in alike or over)
            yield Harmed(record, since_ns, record.arrived_at, len(over), len(alike))


def _in_queue(ledger: EngineLedger) -> list[RequestState]:
    """Return the requests that the scheduler alone holds back. One whose arrival was lost is not known to wait, nor one
    that got tokens since.
    """
    waiting = (each for each in ledger.living().waiting if not is_outside(each))
    return [each for each in waiting if each.arrived_ns and each.progressed_ns <= each.since_ns]


def _in_queue_since(record: RequestState) -> int:
    """Return since when the queue alone decides when it runs: what it waited for by itself does not count."""
    if not LEFT_OUT_FOR.isdisjoint(record.waited_ns):
        return record.since_ns
    return max(record.arrived_ns, record.progressed_ns)


def known_until_ns(ledger: EngineLedger) -> int:
    """Return until when it is known what running requests got: the tokens of a step in flight come as it ends."""
    return min([ledger.looked_ns, *(step.since_ns for step in ledger.state.in_flight.values())])


def without_progress(ledger: EngineLedger) -> Iterator[Harmed]:
    """Yield the running requests with the time of their last token."""
    for record in ledger.living().running:
        yield Harmed(record, record.progressed_ns or record.since_ns, record.since_at)


def computed_again(ledger: EngineLedger) -> Iterator[Harmed]:
    """Yield the running requests that compute again what they had computed."""
    for record in ledger.living().running:
        if record.reached_tokens:
            yield Harmed(record, record.reached_ns, record.reached_at)


def unserved(ledger: EngineLedger) -> Iterator[Harmed]:
    """Yield the waiting requests that the scheduler could run: it runs none, or its reason is contradicted."""
    living, state = ledger.living(), ledger.state
    waiting = _in_queue(ledger)
    if not waiting:
        return
    head, places = ledger.head(), ledger.description.max_num_seqs
    if not living.running:
        if head is not None and head.cause == Cause.PAUSED and not _is_mode_known(ledger):
            return
        idle_ns = _since_ns(ledger, lambda moment: not moment.running, state.launched_ns)
        for record in waiting:
            yield Harmed(record, max(idle_ns, _in_queue_since(record)), record.since_at)
        return
    if head is None or not places or len(living.running) >= places or not has_room(ledger, head):
        return
    since_ns = head.since_ns if head.cause == Cause.UNKNOWN else contradicted_since_ns(ledger, head)
    if since_ns is not None:
        yield from (Harmed(record, max(since_ns, _in_queue_since(record)), head.since_at) for record in waiting)


class QueueState(NamedTuple):
    """What a pass of the scheduler finds: the requests, those of them whose session takes a place, and free blocks."""

    running: int
    waiting: int
    sessions: int
    free: int


_RUNNING_TAKES: Final = frozenset(
    (int(Cause.TOKEN_BUDGET), int(Cause.PREEMPTION_IN_STEP), int(Cause.STEP_IN_FLIGHT), int(Cause.LORA))
)
"""What only requests that run, or a step in flight, can have taken."""
_CHECKED: Final = _RUNNING_TAKES | {
    int(cause) for cause in (Cause.KV_BLOCKS, Cause.BEHIND_HEAD, Cause.MAX_NUM_SEQS, Cause.PAUSED)
}
_MOST_WATERMARK: Final = 0.5
"""Of the pool: an engine may keep blocks free for those that run, and admit no other meanwhile. It keeps less than
this.
"""


def contradicted_since_ns(ledger: EngineLedger, record: RequestState) -> int | None:
    """Return since when the state contradicts the cause that the engine gives for a wait, on the engine's clock, or
    None if the cause may hold. What a connector, an encoder, a compiler or a client has to do is not in the state.
    """
    if not record.is_waiting or record.cause not in _CHECKED or ledger.state.damaged:
        return None
    state, living, waits = ledger.state, ledger.living(), ledger.waiting_by_cause()
    sessions = waits[Cause.STREAMING_INPUT]
    now = QueueState(len(living.running) or len(state.in_flight), len(living.waiting), sessions, state.free)
    if record.cause == Cause.PAUSED:
        runs = state.mode == EngineMode.UNPAUSED and _is_mode_known(ledger)
        return max(record.since_ns, state.mode_since_ns) if runs else None
    if _may_hold(ledger, record, now):
        return None
    return _since_ns(ledger, lambda moment: not _may_hold(ledger, record, moment), record.since_ns)


def _is_mode_known(ledger: EngineLedger) -> bool:
    """Return whether the engine reports that its operator pauses it. Earlier probes of vLLM do not."""
    return ledger.description.engine != "vllm" or ledger.description.reports_modes


def _may_hold(ledger: EngineLedger, record: RequestState, moment: QueueState) -> bool:
    if record.cause == Cause.KV_BLOCKS:
        watermark = _MOST_WATERMARK * ledger.state.usable if moment.running else 0
        return moment.free < _most_blocks(ledger, record) + watermark
    if record.cause == Cause.BEHIND_HEAD:
        return moment.waiting > 1
    if record.cause == Cause.MAX_NUM_SEQS:
        places = ledger.description.max_num_seqs
        return not places or moment.running + moment.sessions >= places
    return moment.running > 0


def _most_blocks(ledger: EngineLedger, record: RequestState) -> int:
    """Return how many blocks it needs at the most: prefix hits, which a failed allocation does not count, take some."""
    groups = max(1, len(ledger.description.groups))
    needed = max(
        blocks_to_run(ledger.state, ledger.description, record), groups * ledger.state.blocks_of_tokens(record)
    )
    return needed - len(record.blocks)


def _since_ns(ledger: EngineLedger, holds: Callable[[QueueState], bool], least_ns: int) -> int:
    """Return since when, after `least_ns`, it has held at each moment that the ledger keeps, on the engine's clock."""
    wall, since_ns = ledger.wall(1) - 1, ledger.state.now_ns
    for point in reversed(ledger.points):
        free = point.balance.free + point.balance.cached_idle
        sessions = dict(point.waiting_by).get(Cause.STREAMING_INPUT, 0)
        if point.at_ns - wall <= least_ns:
            return least_ns
        if not holds(QueueState(point.running, point.waiting, sessions, free)):
            return since_ns
        since_ns = point.at_ns - wall
    return least_ns


def has_room(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether the free blocks are enough for a waiting request."""
    return blocks_to_run(ledger.state, ledger.description, record) - len(record.blocks) <= ledger.state.free


class FirstTokenWait(NamedTuple):
    """How long a request waited for its first token, or has waited for it, and what 95 % of others usually do."""

    waited_s: float
    usual_p95_s: float
    usual_of: int

    @property
    def is_usual(self) -> bool:
        """Whether it is no harm."""
        return self.waited_s <= SLOWER * self.usual_p95_s


def first_token_wait(ledger: EngineLedger, record: RequestState) -> FirstTokenWait | None:
    """Return its wait beside the usual one, or None while that is unknown."""
    usual = ledger.tally.pace.usual()
    if usual is None or not record.arrived_ns:
        return None
    until_ns = record.first_token_ns or record.finished_ns or ledger.state.now_ns
    return FirstTokenWait((until_ns - record.arrived_ns) / 1e9, *usual)


def held_without_progress(ledger: EngineLedger, until_ns: int, least: float) -> dict[int, int]:
    """Return the blocks that no request which gets tokens has had since `until_ns` or earlier, with since when. Empty
    if there are fewer than `least`.

    A block is held in vain from the last token of its last owner on, or from that owner's end: until then it was used.
    What a transfer, a pin or a session is announced to keep has codes of its own, which know how long each may take.
    """
    state, balance, running = ledger.state, ledger.balance(), ledger.living().running
    still = sum(len(record.blocks) for record in running if record.progressed_ns <= until_ns)
    if balance.used - balance.running + still < least:
        return {}
    kept = set(state.pinned).union(*(deferral.blocks for deferral in state.deferrals.values()))
    kept.update(block for record in ledger.living().waiting if is_outside(record) for block in record.blocks)
    used_ns = {n: max(record.progressed_ns, record.finished_ns) for n, record in state.requests.items()}
    found = {
        block: since_ns
        for block, began_ns in enumerate(state.since)
        if block >= state.reserved
        and state.refs[block] > 0
        and block not in kept
        and (since_ns := max([began_ns, *(used_ns.get(owner, 0) for owner in state.owners(block))])) <= until_ns
    }
    return found if len(found) >= least else {}
