"""The shared parts of the detectors of stuck requests: which requests live, which are overdue, and the wording.

How long a request stands still is counted until the scheduler is last known to have gone over its queue: one that
cannot look is stalled, and its requests are not stuck by themselves.

Requests that wait for a fetch of KV from elsewhere are sorted by what is known of its end. That a fetch has ended,
which separates stuck.lost-wakeup from stuck.remote-load, only some engines report (COMPLETION_DELIVERED of a living
request).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, Unpack

from ...base.text import clock_time, counted
from ...contract.kinds import EngineMode, Status
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import contradicted_since_ns
from ...ledger.queue_state import Living, is_outside, is_short_of_blocks
from ...ledger.records import RequestState
from ..detector import Detector
from ..engine_pace import taken_up_until_ns
from ..judgement import Judgement
from ..runbook_files import FindingFields

LOST_WAKE: Final = "the lost events: they may include what it waited for. The next audit shows it"


def was_overtaken(record: RequestState, since_ns: int, running: Iterable[RequestState]) -> bool:
    """Return whether one that came later, and is not more urgent, was admitted after `since_ns`."""
    return any(
        other.admitted_ns > since_ns and other.arrived_ns > record.arrived_ns and other.priority >= record.priority
        for other in running
    )


class Overdue(NamedTuple):
    """Requests that do not move, the longest first: how long, since when (monotonic), and whether still in grace."""

    records: list[RequestState]
    age_s: float
    since_ns: int
    pending: bool

    @property
    def ids(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(record.id for record in self.records)


def overdue_requests(
    ledger: EngineLedger,
    records: Iterable[RequestState],
    since: Callable[[RequestState], int],
    until_ns: int,
    grace_s: float | Callable[[RequestState], float],
) -> Overdue | None:
    """Return the requests that have stood still for longer than `grace_s`, from `since` until `until_ns`, when they
    could last have moved. If there are none, return those beyond half of it. None if there are none of these either.
    grace_s: of all, or of each.

    After a loss, requests that an event has named since are counted from it. Others may have moved in it, and are
    pending. While the operator has the engine paused, none has to move. What happens outside the engine goes on then.
    """
    state = ledger.state
    if state.mode != EngineMode.UNPAUSED:
        return None
    paused_ns = state.mode_since_ns
    began = ((since(r) if is_outside(r) else max(since(r), paused_ns), r.number, r) for r in records)
    aged = sorted(began, key=lambda entry: entry[:2])
    certain = [(max(began, state.lost_ns), n, r) for began, n, r in aged if state.is_certain_request(r)]
    for entries, share, pending in ((certain, 1.0, False), (aged, 0.5, True)):
        late = [
            record
            for began, _, record in entries
            if until_ns - began > share * (grace_s(record) if callable(grace_s) else grace_s) * 1e9
        ]
        if late:
            return Overdue(late, (until_ns - entries[0][0]) / 1e9, entries[0][0], pending)
    return None


def missing_after_loss(ledger: EngineLedger) -> str:
    """Return what would raise the verdict."""
    return LOST_WAKE if ledger.state.damaged else ""


def overdue_judgement(
    detector: Detector[Judgement],
    ledger: EngineLedger,
    late: Overdue,
    *,
    began_at: int,
    unseen: str = "",
    is_unproven: bool = False,
    **own: Unpack[FindingFields],
) -> Judgement:
    """Judge requests that are overdue by the stream, since the event at `began_at`. `own` is the code's own evidence.

    unseen: the signal that would exclude a slow but sound wait, which a time alone does not. With one, the verdict is
    likely. is_unproven: nothing shows yet how long such a wait takes, and the verdict is cannot-tell.
    """
    if is_unproven:
        own["verdict"] = "cannot-tell"
    own["missing"] = missing_after_loss(ledger) or unseen
    own |= {"pending": late.pending, "since_ns": ledger.wall(late.since_ns), "position": ledger.at(began_at)}
    own["requests"] = late.ids
    return detector.finding(ledger, **own)


def since_text(ledger: EngineLedger, late: Overdue) -> str:
    """Return `since 14:02:11`, for the longest."""
    at = clock_time(ledger.wall(late.since_ns))
    return f"since {at}" if len(late.records) == 1 else f"the first of them, {late.records[0].id}, since {at}"


def requests_text(late: Overdue) -> str:
    """Return `Request r-7` or `3 requests`, for the beginning of a sentence."""
    count = len(late.records)
    return f"Request {late.records[0].id}" if count == 1 else counted(count, "request")


def watchdog_report(records: Iterable[RequestState]) -> str:
    """Summarize the reports of the engine's own watchdog about them. A watchdog without a report may be absent, or not
    due yet.
    """
    stalled = [record for record in records if record.stalled_ns]
    if not stalled:
        return "has not spoken"
    step = min(record.stalled_since_step for record in stalled)
    since = f"since step {step}" if step >= 0 else "since before any step"
    return f"reports it too, for {counted(len(stalled), 'request')}, {since}"


def head_short_of_blocks(ledger: EngineLedger) -> RequestState | None:
    """Return the head of the queue if it was refused for blocks that the pool could have and lacks, or else None."""
    head = ledger.head()
    paused = ledger.state.mode != EngineMode.UNPAUSED
    if head is None or paused or not is_short_of_blocks(ledger.state, head):
        return None
    return head if contradicted_since_ns(ledger, head) is None else None


TRANSFER_PROGRESS: Final = "whether the transfer still moves: a large one over a slow link takes as long"
PLANNED_BEFORE_NS: Final = 1_000_000_000
"""A step that was launched so shortly after the end of a fetch may have been planned before it."""


def could_report_until_ns(ledger: EngineLedger) -> int:
    """Return the last time, on the engine's clock, at which it could have reported the end of a wait: the launch of a
    step in flight, or else when the engine was last seen and not paused.
    """
    return ledger.looked_ns if ledger.state.in_flight else taken_up_until_ns(ledger)


def _engine_sleeps(ledger: EngineLedger, living: Living) -> bool:
    """Return whether the engine's own thread does nothing: its heart beats, and no step runs and no pass is made."""
    beat = ledger.state.heartbeat
    idle = beat is not None and beat.step_in_flight < 0 and not living.running
    return idle and ledger.beats.count > 0 and not ledger.beats.passes_advanced


def _not_noticed(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether the fetch has ended and the engine has since launched no step and unpinned nothing."""
    ended_ns = record.fetch_ended_ns
    looked = any(tier.unpinned_ns >= ended_ns for tier in ledger.state.tiers.values())
    return bool(ended_ns) and not looked and ended_ns + PLANNED_BEFORE_NS > ledger.state.launched_ns


def blocks_of_requests(records: list[RequestState]) -> list[int]:
    """Return the blocks of the requests, sorted."""
    return sorted({block for record in records for block in record.blocks})


class FetchWaits(NamedTuple):
    """Waiting requests by the state of their fetch: still under way, or ended while the engine sleeps."""

    under_way: list[RequestState]
    not_noticed: list[RequestState]


def fetch_waits(ledger: EngineLedger) -> FetchWaits:
    """Sort the requests that wait for KV that is fetched."""
    living = ledger.living()
    waits = FetchWaits([], [])
    fetching = [r for r in living.waiting if r.status == Status.WAITING_FOR_REMOTE_KVS and r.fetching_ns]
    if fetching:
        asleep = _engine_sleeps(ledger, living)
        for record in fetching:
            (waits.not_noticed if asleep and _not_noticed(ledger, record) else waits.under_way).append(record)
    return waits
