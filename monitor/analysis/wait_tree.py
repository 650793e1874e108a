"""The wait tree: what a request waits for, who has it, and what those wait for in turn, from a waiting request to its
roots.

request r-9, WAITING for 12 s: lacks 8 blocks (needs 18, 10 free)
├ 64 blocks: the KV connector, which keeps them for 1 request that ended (r-1) and waits for a completion, 27 s at most
│ ← not asked for 12 s
└ 22 blocks: request r-5, RUNNING for 6.0 s
"""

from __future__ import annotations

from typing import Final

import msgspec

from kvscope.monitor.analysis.ownership import WAITS_FOR
from kvscope.monitor.analysis.wait_graph import WaitGraph, WaitHolder
from kvscope.monitor.events.kinds import Cause, Status, name_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, listed

MAX_WAIT_HOLDERS: Final = 5


class Wait(msgspec.Struct, frozen=True):
    """One that is waited for, or waits: what it is, how many blocks would come back if it gave its own up, and what it
    waits for itself. The holders that could free most stand first. A holder that waits for nothing is a root.
    `request`: its id, if it is one. resource: what it waits for. still_s: for how long it has shown no progress, as far
    as that is known, and moves: whether it made progress when it last could.
    """

    text: str
    blocks: int
    waits_for: list[Wait]
    request: str = ""
    resource: str = ""
    still_s: float | None = None
    moves: bool | None = None


def wait_of(ledger: EngineLedger, record: RequestState) -> Wait:
    """Return the tree under `record`. One that waits for nothing is a tree of itself."""
    return _of_request(WaitGraph(ledger), record, ())


def waited_s(ledger: EngineLedger, record: RequestState) -> dict[str, float]:
    """Seconds that a request has waited until now, by reason."""
    waited: dict[int, float] = {cause: ns / 1e9 for cause, ns in record.waited_ns.items()}
    if record.is_waiting:
        cause = ledger.cause_of_wait(record)
        waited[cause] = waited.get(cause, 0.0) + ledger.age_s(record.since_ns)
    return {name_of(Cause, cause): seconds for cause, seconds in waited.items()}


def _of_request(graph: WaitGraph, record: RequestState, above: tuple[int, ...]) -> Wait:
    """`above`: the numbers of those that wait for it."""
    ledger = graph.ledger
    status = name_of(Status, record.status)
    here = f"request {record.id}, {status} for {duration(ledger.age_s(record.since_ns))}"
    blocks = _come_back(ledger, record.blocks)
    if record.number in above:
        caught = f"request {record.id}, which waits itself: a deadlock"
        return Wait(caught, blocks, [], record.id, moves=False)
    if record.is_finished:
        deferral = ledger.state.deferrals.get(record.number)
        if deferral is None:
            return Wait(here, blocks, [], record.id)
        holder = graph.of_deferral(deferral)
        name, waiting = WAITS_FOR.get(deferral.holder, UNKNOWN_KEEPER)
        keeper = f"{name}, which {waiting}, {duration(ledger.age_s(deferral.since_ns))}"
        return Wait(f"{here}: the free of its blocks is deferred", blocks, [_wait_root(keeper, 0, holder)], record.id)
    if record.is_running:
        return _wait_root(here, blocks, graph.of_request(record), record.id)
    lacks, waits_for = _needs(graph, record, (*above, record.number))
    edge = graph.waits_for(record)
    resource = edge.resource if edge is not None else ""
    return Wait(f"{here}{': ' if lacks else ''}{lacks}", blocks, waits_for, record.id, resource)


def _wait_root(text: str, blocks: int, holder: WaitHolder, request: str = "") -> Wait:
    """One that holds what is waited for, with what shows whether it moves."""
    progress = progress_text(holder)
    still_s = round(holder.still_s, 1) if holder.unit else None
    return Wait(
        f"{text}{' ← ' if progress else ''}{progress}", blocks, [], request, still_s=still_s, moves=holder.moves
    )


def progress_text(holder: WaitHolder) -> str:
    """Describe the progress that a holder does not make, or empty while it moves, or where nothing shows it."""
    still = duration(holder.still_s)
    if holder.moves or not holder.unit:
        return ""
    if holder.unit == "polls":
        return f"not asked for {still}"
    if holder.unit == "transfers":
        return f"no transfer has ended for {still}"
    if holder.unit == "grammars":
        return f"no grammar has compiled for {still}"
    if holder.unit == "tokens":
        return f"no token for {still}"
    return f"its step is over since {still}" if holder.kind == "fence" else "longer than any earlier step"


def _needs(graph: WaitGraph, record: RequestState, above: tuple[int, ...]) -> tuple[str, list[Wait]]:
    """Return the needs of a waiting request, in words, and the holders of its blocks."""
    ledger, edge = graph.ledger, graph.waits_for(record)
    if edge is None:
        return "", []
    holder = edge.holders[0] if edge.holders else None
    if edge.resource == "place-in-queue" and holder is not None:
        return "waits behind the head of the queue", [_of_request(graph, ledger.state.requests[holder.number], above)]
    if edge.resource == "kv-blocks":
        return _short_of_blocks(graph, record, above)
    if edge.resource == "batch-slot":
        running = ledger.living().running
        most = ledger.description.max_num_seqs or len(running)
        places = [_of_request(graph, r, above) for r in running]
        return f"waits for a batch slot: {len(running):,} run, of {most:,} that may (max_num_seqs)", _ranked(places)
    if edge.resource == "remote-kv" and record.ready_ns:
        since = duration(ledger.age_s(record.ready_ns))
        return f"its fetch ended {since} ago, and the scheduler has not promoted it", []
    if edge.resource == "remote-kv" and holder is not None:
        since = duration(ledger.age_s(record.fetching_ns or record.since_ns))
        return NEEDS["remote-kv"], [_wait_root(f"the KV connector, which fetches since {since}", 0, holder)]
    if edge.resource == "pass":
        waits = [
            _wait_root(f"{one.name}, in flight for {duration(one.still_s)}", 0, one._replace(still_s=0.0))
            for one in edge.holders
        ]
        return "the scheduler has not reached it since", waits
    if edge.resource in NEEDS and holder is not None:
        return NEEDS[edge.resource], [_wait_root(holder.name, 0, holder)]
    return name_of(Cause, ledger.cause_of_wait(record)), []


NEEDS: Final = {
    "front-end": "the front end has it",
    "grammar": "its grammar is not there",
    "input": "its next input has not arrived",
    "remote-kv": "its KV is being fetched",
    "pause": "the engine is paused",
}
UNKNOWN_KEEPER: Final = ("an unknown kind of holder", "waits")


def _short_of_blocks(graph: WaitGraph, record: RequestState, above: tuple[int, ...]) -> tuple[str, list[Wait]]:
    ledger = graph.ledger
    lacking = max(0, record.blocks_needed - record.blocks_free_then)
    usable = ledger.state.total - ledger.state.reserved
    if record.blocks_needed > usable:
        return f"needs {counted(record.blocks_needed, 'block')}, and the whole pool has {usable:,}", []
    required = f"needs {record.blocks_needed:,}, {record.blocks_free_then:,} free"
    return f"is short of {counted(lacking, 'block')} ({required})", _holders(graph, above)


def _holders(graph: WaitGraph, above: tuple[int, ...]) -> list[Wait]:
    """All that hold blocks, but for the one that lacks them."""
    requests = graph.ledger.state.requests.values()
    living = [r for r in requests if r.blocks and not r.is_finished and r.number != above[-1]]
    return _ranked([*_of_the_ended(graph), *(_of_request(graph, record, above) for record in living)])


def _of_the_ended(graph: WaitGraph) -> list[Wait]:
    """Yield the keepers of blocks of requests that have ended, and blocks without an owner."""
    ledger = graph.ledger
    state = ledger.state
    waits = []
    for holder, (name, waiting) in WAITS_FOR.items():
        kept = [deferral for deferral in state.deferrals.values() if deferral.holder == holder]
        if kept:
            blocks = _come_back(ledger, {block for deferral in kept for block in deferral.blocks})
            since = duration(max(ledger.age_s(deferral.since_ns) for deferral in kept))
            of = f"{counted(len(kept), 'request')} that ended ({listed([deferral.id for deferral in kept])})"
            stillest = max(map(graph.of_deferral, kept), key=lambda one: one.still_s)
            waits.append(
                _wait_root(f"{name}, which keeps them for {of} and {waiting}, {since} at most", blocks, stillest)
            )
    lost = ledger.balance().unaccounted
    if lost:
        waits.append(Wait("no owner: they are UNACCOUNTED, neither released nor deferred", lost, [], moves=False))
    return waits


def _ranked(waits: list[Wait]) -> list[Wait]:
    ranked = sorted(waits, key=lambda wait: -wait.blocks)
    left = ranked[MAX_WAIT_HOLDERS:]
    if left:
        ranked[MAX_WAIT_HOLDERS:] = [Wait(f"{len(left):,} more", sum(wait.blocks for wait in left), [])]
    return ranked


def _come_back(ledger: EngineLedger, blocks: list[int] | set[int]) -> int:
    """How many of them no other request has a reference to."""
    return sum(ledger.state.refs[block] == 1 for block in blocks)
