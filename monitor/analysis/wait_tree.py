"""What a request waits for, who has it, and what those wait for in turn: the tree from a waiting request to its roots.

request r-9, WAITING for 12 s: lacks 8 blocks (needs 18, 10 free)
├ 64 blocks: the KV connector, which keeps them for 1 request that ended (r-1) and waits for a completion, 27 s at most
└ 22 blocks: request r-5, RUNNING for 6.0 s
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope.monitor.analysis.ownership import WAITS_FOR
from kvscope.monitor.events.kinds import Cause, Status, name_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, listed

MAX_WAIT_HOLDERS: Final = 5


class Wait(msgspec.Struct, frozen=True):
    """One that is waited for, or waits: what it is, how many blocks would come back if it gave its own up, and what it
    waits for itself. Those who could give most stand first; one that waits for nothing is a root. `request`: its id, if
    it is one.
    """

    text: str
    blocks: int
    waits_for: list[Wait]
    request: str = ""


def wait_of(ledger: EngineLedger, record: RequestState) -> Wait:
    """The tree under `record`. One that waits for nothing is a tree of itself."""
    return _of_request(ledger, record, ())


def waited_s(ledger: EngineLedger, record: RequestState) -> dict[str, float]:
    """Seconds that a request has waited until now, by reason."""
    waited: dict[int, float] = {cause: ns / 1e9 for cause, ns in record.waited_ns.items()}
    if record.is_waiting:
        cause = ledger.cause_of_wait(record)
        waited[cause] = waited.get(cause, 0.0) + ledger.age_s(record.since_ns)
    return {name_of(Cause, cause): seconds for cause, seconds in waited.items()}


def _of_request(ledger: EngineLedger, record: RequestState, above: tuple[int, ...]) -> Wait:
    """`above`: the numbers of those that wait for it."""
    status = name_of(Status, record.status)
    here = f"request {record.id}, {status} for {duration(ledger.age_s(record.since_ns))}"
    blocks = _come_back(ledger, record.blocks)
    if record.number in above:
        caught = f"request {record.id}, which waits itself: neither can go on without the other"
        return Wait(caught, blocks, [], record.id)
    if record.is_finished:
        deferral = ledger.state.deferrals.get(record.number)
        if deferral is None:
            return Wait(here, blocks, [], record.id)
        name, waiting = WAITS_FOR.get(deferral.holder, ("somebody", "waits"))
        keeper = f"{name}, which {waiting}, {duration(ledger.age_s(deferral.since_ns))}"
        return Wait(f"{here}: the free of its blocks is deferred", blocks, [Wait(keeper, 0, [])], record.id)
    lacks, waits_for = _needs(ledger, record, (*above, record.number))
    return Wait(f"{here}{': ' if lacks else ''}{lacks}", blocks, waits_for, record.id)


def _needs(ledger: EngineLedger, record: RequestState, above: tuple[int, ...]) -> tuple[str, list[Wait]]:
    """What a living request needs to go on, in words, and who stands in its way."""
    if record.status == Status.RECEIVED:
        return "the front end has it", [Wait("the front end, which has not passed it on", 0, [])]
    if record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        return "its grammar is not there", [Wait("the grammar's compiler", 0, [])]
    if record.status == Status.WAITING_FOR_STREAMING_REQ:
        return "its next input has not come", [Wait("the client", 0, [])]
    if record.status == Status.WAITING_FOR_REMOTE_KVS:
        since = duration(ledger.age_s(record.fetching_ns or record.since_ns))
        return "its KV is being fetched", [Wait(f"the KV connector, which fetches since {since}", 0, [])]
    cause = ledger.cause_of_wait(record)
    head = ledger.head()
    if (
        record.is_waiting and head is not None and head is not record
    ):  # a reason of its own is from when it was the head
        return "stands behind the head of the queue", [_of_request(ledger, head, above)]
    if cause == Cause.KV_BLOCKS:
        lacking = max(0, record.blocks_needed - record.blocks_free_then)
        usable = ledger.state.total - ledger.state.reserved
        if record.blocks_needed > usable:
            return f"needs {counted(record.blocks_needed, 'block')}, and the whole pool has {usable:,}", []
        said = f"needs {record.blocks_needed:,}, {record.blocks_free_then:,} free"
        return f"lacks {counted(lacking, 'block')} ({said})", _holders(ledger, above)
    if cause == Cause.MAX_NUM_SEQS:
        running = [r for r in ledger.state.requests.values() if r.is_running]
        most = ledger.description.max_num_seqs or len(running)
        places = [_of_request(ledger, r, above) for r in running]
        return f"lacks a place: {len(running):,} run, of {most:,} that may (max_num_seqs)", _ranked(places)
    if record.is_waiting and cause in (Cause.NEW, Cause.PREEMPTED, Cause.NONE):
        steps = [
            f"step {s.step}, in flight for {duration(ledger.age_s(s.since_ns))}"
            for s in ledger.state.in_flight.values()
        ]
        return "the scheduler has not looked at it since", [Wait(text, 0, []) for text in steps]
    return (name_of(Cause, cause) if cause != Cause.NONE else ""), []


def _holders(ledger: EngineLedger, above: tuple[int, ...]) -> list[Wait]:
    """All that hold blocks, but for the one that lacks them."""
    living = [r for r in ledger.state.requests.values() if r.blocks and not r.is_finished and r.number != above[-1]]
    return _ranked([*_of_the_ended(ledger), *(_of_request(ledger, record, above) for record in living)])


def _of_the_ended(ledger: EngineLedger) -> list[Wait]:
    """Those who keep blocks of requests that have ended, and what nobody keeps."""
    state = ledger.state
    waits = []
    for holder, (name, waiting) in WAITS_FOR.items():
        kept = [deferral for deferral in state.deferrals.values() if deferral.holder == holder]
        if kept:
            blocks = _come_back(ledger, {block for deferral in kept for block in deferral.blocks})
            since = duration(max(ledger.age_s(deferral.since_ns) for deferral in kept))
            of = f"{counted(len(kept), 'request')} that ended ({listed([deferral.id for deferral in kept])})"
            waits.append(Wait(f"{name}, which keeps them for {of} and {waiting}, {since} at most", blocks, []))
    lost = ledger.balance().unaccounted
    if lost:
        waits.append(Wait("nobody: they are UNACCOUNTED, neither released nor deferred", lost, []))
    return waits


def _ranked(waits: list[Wait]) -> list[Wait]:
    ranked = sorted(waits, key=lambda wait: -wait.blocks)
    left = ranked[MAX_WAIT_HOLDERS:]
    if left:
        ranked[MAX_WAIT_HOLDERS:] = [Wait(f"{len(left):,} more", sum(wait.blocks for wait in left), [])]
    return ranked


def _come_back(ledger: EngineLedger, blocks: list[int] | set[int]) -> int:
    """How many of them nobody else has a reference to."""
    return sum(ledger.state.refs[block] == 1 for block in blocks)
