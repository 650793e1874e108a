"""What the detectors of stuck requests have in common: who lives, who has waited for too long, and on whose word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from kvscope.monitor.detectors.judgement import Judgement, Verdict
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted

HEARTBEAT_S: Final = 1.0
"""How often an engine that lives is heard."""
OUTSIDE: Final = frozenset(
    int(status)
    for status in (
        Status.WAITING_FOR_REMOTE_KVS,
        Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        Status.WAITING_FOR_STREAMING_REQ,
    )
)
LOST: Final = "the events that were lost: what it waited for may be among them; the next audit tells"


class Living(NamedTuple):
    """The requests that have not ended, by where they are; each list in the order of their arrival."""

    received: list[RequestState]
    waiting: list[RequestState]
    running: list[RequestState]


def living(ledger: EngineLedger) -> Living:
    """Everybody who lives, in one look."""
    found = Living([], [], [])
    for record in ledger.state.requests.values():
        if record.is_running:
            found.running.append(record)
        elif record.is_waiting:
            found.waiting.append(record)
        elif record.status == Status.RECEIVED:
            found.received.append(record)
    return found


def is_outside(record: RequestState) -> bool:
    """Whether it waits for something outside the scheduler."""
    return record.status in OUTSIDE


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


def overdue(
    records: Iterable[RequestState], since: Callable[[RequestState], int], until_ns: int, grace_s: float
) -> Overdue | None:
    """Those that have stood still for longer than `grace_s`, from `since` until `until_ns`, the last moment at which
    they could have moved; if there are none, those beyond half of it. None if there are none of these either.
    """
    aged = sorted(((since(record), record.number, record) for record in records), key=lambda entry: entry[:2])
    for share in (1.0, 0.5):
        late = [record for began, _, record in aged if until_ns - began > share * grace_s * 1e9]
        if late:
            return Overdue(late, (until_ns - aged[0][0]) / 1e9, aged[0][0], share < 1)
    return None


def verdict_of(ledger: EngineLedger) -> Verdict:
    """What the stream supports: after a loss, only likely."""
    return "likely" if ledger.state.damaged else "confirmed"


def what_is_missing(ledger: EngineLedger) -> str:
    """What would raise the verdict."""
    return LOST if ledger.state.damaged else ""


def judged(ledger: EngineLedger, late: Overdue, *, began_at: int, **own: Any) -> Judgement:
    """What is judged of those that are overdue, on the stream's word, since the event at `began_at`; `own` is what the
    code has for itself.
    """
    return Judgement(
        engine=ledger.engine,
        verdict=verdict_of(ledger),
        pending=late.pending or ledger.state.damaged,
        since_ns=ledger.wall(late.since_ns),
        position=ledger.at(began_at),
        requests=late.ids,
        missing=what_is_missing(ledger),
        **own,
    )


def since_in_words(ledger: EngineLedger, late: Overdue) -> str:
    """`since 14:02:11`, of the longest."""
    at = clock_time(ledger.wall(late.since_ns))
    return f"since {at}" if len(late.records) == 1 else f"the first of them, {late.records[0].id}, since {at}"


def requests(late: Overdue) -> str:
    """`Request r-7` or `3 requests`, for the beginning of a sentence."""
    count = len(late.records)
    return f"Request {late.records[0].id}" if count == 1 else counted(count, "request")


def watchdog(records: Iterable[RequestState]) -> str:
    """What the engine's own watchdog says of them; one that never spoke may not be there, or not be due yet."""
    stalled = [record for record in records if record.stalled_ns]
    if not stalled:
        return "has not spoken"
    step = min(record.stalled_since_step for record in stalled)
    since = f"since step {step}" if step >= 0 else "since before any step"
    return f"says so too, of {counted(len(stalled), 'request')}, {since}"
