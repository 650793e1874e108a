"""The wait-for graph: for each request, the resource that it waits for, who holds that, and whether the holder moves.

A holder makes progress in its own unit: a running request in tokens, a step in time against the longest seen, a
connector in polls and transfers, a compiler in grammars. The graph names cycles and holders that stand still. It has no
thresholds: how long a holder may stand still is for detectors to judge.

The same in words: why a block is held, and what a request waits for, as chains and trees down to live reasons.

block 812 ← request r-91, FINISHED_ABORTED 14:02:11 ← free deferred by the KV connector ← waits for a completion, 312 s

request r-9, WAITING for 12 s: lacks 8 blocks (needs 18, 10 free)
├ 64 blocks: the KV connector, which keeps them for 1 request that ended (r-1) and waits for a completion, 27 s at most
│ ← not asked for 12 s
└ 22 blocks: request r-5, RUNNING for 6.0 s
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from ..base.text import clock_time, counted, duration, listed
from ..contract.kinds import Cause, Holder, Status, name_of
from .durations import WaitHistory
from .engine_ledger import EngineLedger
from .queue_state import was_found_behind
from .records import Deferral, RequestState

WaitResource = Literal[
    "kv-blocks",
    "batch-slot",
    "token-budget",
    "lora-slot",
    "encoder-cache",
    "grammar",
    "remote-kv",
    "fence",
    "pause",
    "place-in-queue",
    "input",
    "front-end",
    "pass",
]
HolderKind = Literal["request", "connector", "fence", "session", "step", "compiler", "client", "operator", "nothing"]
ProgressUnit = Literal["tokens", "steps", "transfers", "polls", "grammars", ""]

SCHEDULER_RESOURCES: Final[dict[int, WaitResource]] = {
    Cause.KV_BLOCKS: "kv-blocks",
    Cause.MAX_NUM_SEQS: "batch-slot",
    Cause.TOKEN_BUDGET: "token-budget",
    Cause.LORA: "lora-slot",
    Cause.ENCODER: "encoder-cache",
    Cause.PAUSED: "pause",
    Cause.CONNECTOR: "remote-kv",
    Cause.BEHIND_HEAD: "place-in-queue",
}
HELD_BY: Final[dict[int, HolderKind]] = {
    Holder.CONNECTOR: "connector",
    Holder.FENCE: "fence",
    Holder.SESSION: "session",
}
NOT_POLLED_S: Final = 3.0
"""An engine asks its connector in each pass, and heartbeats come once a second."""


class WaitHolder(NamedTuple):
    """A holder of what a request waits for.

    name: a request's id, or what it is. number: of a request (-1 if it is none). blocks: of the pool, that it holds.
    still_s: seconds without progress in `unit`. moves: whether it made progress when it last could (None: not known).
    """

    kind: HolderKind
    name: str
    number: int = -1
    blocks: int = 0
    unit: ProgressUnit = ""
    still_s: float = 0.0
    moves: bool | None = None


class WaitsFor(NamedTuple):
    """The resource that one request waits for. amount: how much of the resource it lacks, 0 where that is not
    counted.
    """

    request: str
    number: int
    resource: WaitResource
    amount: int
    holders: tuple[WaitHolder, ...]


class WaitGraph:
    """The graph of one engine now. Holders of a resource are found once for all that wait for it."""

    def __init__(self, ledger: EngineLedger) -> None:
        self.ledger = ledger
        self._edges: dict[int, WaitsFor | None] = {}
        self._of_blocks: tuple[WaitHolder, ...] | None = None
        self._running: tuple[WaitHolder, ...] | None = None

    def waits_for(self, record: RequestState) -> WaitsFor | None:
        """Return what a request waits for, or None for one that runs or has ended."""
        if record.number not in self._edges:
            self._edges[record.number] = self._edge(record)
        return self._edges[record.number]

    def cycle_of(self, record: RequestState) -> list[str]:
        """Return the requests of a cycle that this one is in, in order, or an empty list if it is in none.

        A request is in a cycle if, for each way out of its wait, the holder waits in turn for this request or for
        another of the cycle, and nothing outside the cycle moves.
        """
        reached: dict[int, str] = {}
        closes = False
        open_ends = [record]
        while open_ends:
            waiter = open_ends.pop()
            if waiter.number in reached:
                continue
            reached[waiter.number] = waiter.id
            edge = self.waits_for(waiter)
            if edge is None:
                return []  # it runs: it may end
            for holder in edge.holders:
                held_by = self.ledger.state.requests.get(holder.number)
                if held_by is None or held_by.is_finished:
                    if holder.moves is not False and holder.kind != "nothing":
                        return []  # something outside may still give it back
                else:
                    closes = closes or holder.number in reached
                    open_ends.append(held_by)
        return list(reached.values()) if closes else []

    # ---------------------------------------------------------------- edges

    def _edge(self, record: RequestState) -> WaitsFor | None:
        ledger = self.ledger
        if record.is_finished or record.is_running:
            return None
        outside = self._outside(record)
        if outside is not None:
            return outside
        if ledger.state.mode:
            return self._made(record, "pause", 0, WaitHolder("operator", "the operator, who paused the engine"))
        head = ledger.head()
        if head is not None and head is not record:  # a cause of its own is from when it was the head
            return self._made(record, "place-in-queue", 0, self.of_request(head))
        resource = SCHEDULER_RESOURCES.get(ledger.cause_of_wait(record))
        if resource == "kv-blocks":
            lacking = max(0, record.blocks_needed - record.blocks_free_then)
            holders = [holder for holder in self._block_holders() if holder.number != record.number]
            return self._made(record, resource, lacking, *holders)
        if resource in ("batch-slot", "token-budget", "lora-slot", "encoder-cache"):
            return self._made(record, resource, int(resource == "batch-slot"), *self._running_holders())
        if resource is not None:
            return self._made(record, resource, 0)
        return self._made(record, "pass", 0, *self._steps())

    def _made(self, record: RequestState, resource: WaitResource, amount: int, *holders: WaitHolder) -> WaitsFor:
        return WaitsFor(record.id, record.number, resource, amount, holders)

    def _outside(self, record: RequestState) -> WaitsFor | None:
        """Return what it waits for if the scheduler does not control it."""
        ledger, waits = self.ledger, self.ledger.outside_waits
        if record.status == Status.RECEIVED:
            return self._made(record, "front-end", 0, WaitHolder("client", "the front end"))
        if record.status == Status.WAITING_FOR_STREAMING_REQ:
            return self._made(record, "input", 0, WaitHolder("client", "the client"))
        if record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            still_s = ledger.age_s(waits.grammars.still_since_ns(record.arrived_ns))
            moves = _keeps_pace(waits.grammars, still_s, 0)
            compiler = WaitHolder("compiler", "the grammar's compiler", unit="grammars", still_s=still_s, moves=moves)
            return self._made(record, "grammar", 1, compiler)
        if record.status == Status.WAITING_FOR_REMOTE_KVS and not _stands_behind(record, ledger.head()):
            began_ns = record.fetching_ns or record.since_ns
            still_s = ledger.age_s(waits.fetches.still_since_ns(began_ns))
            moves = None if record.fetch_ended_ns else _keeps_pace(waits.fetches, still_s, len(record.blocks))
            connector = WaitHolder(
                "connector", "the KV connector", unit="transfers", still_s=still_s, moves=self._polled(moves)
            )
            return self._made(record, "remote-kv", len(record.blocks), connector)
        return None

    # ---------------------------------------------------------------- holders

    def _block_holders(self) -> tuple[WaitHolder, ...]:
        if self._of_blocks is None:
            state = self.ledger.state
            held = [self.of_deferral(deferral) for deferral in state.deferrals.values() if deferral.blocks]
            held += [
                self.of_request(record)
                for record in state.requests.values()
                if record.blocks and not record.is_finished
            ]
            lost = self.ledger.balance().unaccounted
            if lost:
                held.append(WaitHolder("nothing", "no owner: UNACCOUNTED", blocks=lost, moves=False))
            self._of_blocks = tuple(sorted(held, key=lambda holder: -holder.blocks))
        return self._of_blocks

    def _running_holders(self) -> tuple[WaitHolder, ...]:
        if self._running is None:
            self._running = tuple(map(self.of_request, self.ledger.living().running))
        return self._running

    def _steps(self) -> tuple[WaitHolder, ...]:
        ledger = self.ledger
        longest_s = ledger.step_times.longest_s
        ages = [(step.step, ledger.age_s(step.since_ns)) for step in ledger.state.in_flight.values()]
        return tuple(
            WaitHolder("step", f"step {number}", unit="steps", still_s=age, moves=age <= longest_s or None)
            for number, age in ages
        )

    def of_request(self, record: RequestState) -> WaitHolder:
        """Return a live request as a holder. A running one moves if it got tokens in the last step that completed, or
        since.
        """
        ledger = self.ledger
        if not record.is_running:
            still_s = ledger.age_s(record.since_ns)
            return WaitHolder("request", record.id, record.number, len(record.blocks), "", still_s, None)
        since_ns = ledger.step_times.completed_ns - round(ledger.step_times.longest_s * 1e9)
        still_s = ledger.age_s(record.progressed_ns)
        moves = record.progressed_ns >= since_ns
        return WaitHolder("request", record.id, record.number, len(record.blocks), "tokens", still_s, moves)

    def of_deferral(self, deferral: Deferral) -> WaitHolder:
        """Return the keeper of an ended request's blocks as a holder."""
        ledger, blocks = self.ledger, len(deferral.blocks)
        kind = HELD_BY.get(deferral.holder, "connector")
        name, number = deferral.id, deferral.request
        if kind == "fence":
            still_s = ledger.age_s(deferral.fence_passed_ns or deferral.since_ns)
            return WaitHolder(kind, name, number, blocks, "steps", still_s, not deferral.fence_passed_ns)
        if kind == "session":
            return WaitHolder(kind, name, number, blocks, "", ledger.age_s(deferral.since_ns), None)
        sends = ledger.outside_waits.sends
        still_s = ledger.age_s(sends.still_since_ns(deferral.since_ns))
        moves = self._polled(_keeps_pace(sends, still_s, blocks))
        unit: ProgressUnit = "transfers"
        if ledger.unpolled_s() > NOT_POLLED_S:
            unit, still_s = "polls", ledger.unpolled_s()
        return WaitHolder(kind, name, number, blocks, unit, still_s, moves)

    def _polled(self, moves: bool | None) -> bool | None:
        """Return None if the engine does not poll its connector, since its progress is then not processed."""
        return False if self.ledger.unpolled_s() > NOT_POLLED_S else moves


def _stands_behind(record: RequestState, head: RequestState | None) -> bool:
    """Whether it waits for its turn behind a head that lacks something itself. vLLM leaves it in the status of its
    fetch until then.
    """
    lacks = head is not None and head is not record and head.cause != Cause.BEHIND_HEAD
    return lacks and was_found_behind(record)


def _keeps_pace(history: WaitHistory, still_s: float, blocks: int) -> bool | None:
    """Whether a wait is no longer than the longest that ended, or None where none has."""
    return still_s <= history.longest_s(blocks) or None if history.ended else None


WAITS_FOR: dict[int, tuple[str, str]] = {
    Holder.CONNECTOR: ("the KV connector", "waits for a completion"),
    Holder.FENCE: ("a step that may still write it", "waits for the step"),
    Holder.SESSION: ("an open session", "waits for the session's next input"),
}


def because(ledger: EngineLedger, block: int) -> list[list[str]]:
    """Return the chains that hold `block`, each from the block to its reason. If nothing holds it, one chain states
    that.

    Raises ValueError if the pool has no such block.
    """
    state = ledger.state
    if not 0 <= block < state.total:
        raise ValueError(f"there is no block {block}: the pool of {ledger.engine} has blocks 0 to {state.total - 1}")
    here = f"block {block}"
    since = duration(ledger.age_s(state.since[block]))
    if block < state.reserved:
        return [[here, "reserved: the null block, never handed out"]]
    if state.refs[block] <= 0:
        if state.hashes[block]:
            return [[here, f"cached-idle for {since}: the prefix cache keeps it until the space is needed"]]
        return [[here, f"free for {since}"]]
    chains = [[here, *_owner(ledger, number, block)] for number in state.owners(block)]
    for number in state.detached.get(block, ()):
        link = f"once in the table of request {_owner_name(ledger, number)}, detached"
        chains.append([here, link, *_after_the_end(ledger, number, block)])
    surplus = state.refs[block] - len(chains)
    if surplus > 0:
        chains.append([here, f"UNACCOUNTED: {counted(surplus, 'reference')} that no request acquired in any event"])
    return chains


def _owner(ledger: EngineLedger, number: int, block: int) -> list[str]:
    record = ledger.state.requests.get(number)
    if record is None:
        return [f"request #{number}, of which nothing is known"]
    status = name_of(Status, record.status)
    if record.is_finished:
        ended = f"request {record.id}, {status} {clock_time(ledger.wall(record.finished_ns))}"
        return [ended, *_after_the_end(ledger, number, block)]
    for_long = duration(ledger.age_s(record.since_ns))
    if record.is_running:
        progress = f"{record.computed_tokens:,} tokens computed, {record.output_tokens:,} generated"
        quiet = ledger.age_s(record.progressed_ns)
        last = f", last progress {duration(quiet)} ago" if quiet > 1 else ""
        return [f"request {record.id}, {status} for {for_long}", progress + last]
    cause = ledger.cause_of_wait(record).name
    return [f"request {record.id}, {status} for {for_long}", f"waits: {cause}"]


def _after_the_end(ledger: EngineLedger, number: int, block: int) -> list[str]:
    state = ledger.state
    if not state.is_deferred(number, block):
        return ["UNACCOUNTED: neither released nor deferred"]
    deferral = state.deferrals[number]
    by, waits = WAITS_FOR.get(deferral.holder, ("somebody", "waits"))
    return [f"free deferred by {by}", f"{waits}, {duration(ledger.age_s(deferral.since_ns))}{_lease(ledger, deferral)}"]


def _lease(ledger: EngineLedger, deferral: Deferral) -> str:
    if deferral.lease_deadline_ns <= 0:
        return " (under an unknown lease)" if deferral.lease_deadline_ns else ""
    left = (ledger.wall(deferral.lease_deadline_ns) - ledger.now_ns) / 1e9
    return f" (lease ends in {duration(left)})" if left > 0 else f" (lease ended {duration(abs(left))} ago)"


def _owner_name(ledger: EngineLedger, number: int) -> str:
    record = ledger.state.requests.get(number)
    if record is not None:
        return record.id
    deferral = ledger.state.deferrals.get(number)
    return deferral.id if deferral else f"#{number}"


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
    """Return the tree of what a request waits for. It has one node if the request waits for nothing."""
    return _of_request(WaitGraph(ledger), record, ())


def waited_s(ledger: EngineLedger, record: RequestState) -> dict[str, float]:
    """Return the seconds that a request has waited until now, by reason."""
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
    """Return a holder as a root of the tree, with what shows whether it moves."""
    progress = progress_text(holder)
    still_s = round(holder.still_s, 1) if holder.unit else None
    return Wait(
        f"{text}{' ← ' if progress else ''}{progress}", blocks, [], request, still_s=still_s, moves=holder.moves
    )


STANDS_STILL: Final = {
    "polls": "not asked for {}",
    "transfers": "no transfer has ended for {}",
    "grammars": "no grammar has compiled for {}",
    "tokens": "no token for {}",
}


def progress_text(holder: WaitHolder) -> str:
    """Say how long a holder has made no progress. Empty while it moves, or if nothing shows whether it does."""
    still = duration(holder.still_s)
    if holder.moves or not holder.unit:
        return ""
    if holder.unit in STANDS_STILL:
        return STANDS_STILL[holder.unit].format(still)
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
    usable = ledger.state.usable
    if record.blocks_needed > usable:
        return f"needs {counted(record.blocks_needed, 'block')}, and the whole pool has {usable:,}", []
    required = f"needs {record.blocks_needed:,}, {record.blocks_free_then:,} free"
    return f"is short of {counted(lacking, 'block')} ({required})", _holders(graph, above)


def _holders(graph: WaitGraph, above: tuple[int, ...]) -> list[Wait]:
    """Return all that hold blocks, except the request that lacks them."""
    requests = graph.ledger.state.requests.values()
    living = [r for r in requests if r.blocks and not r.is_finished and r.number != above[-1]]
    return _ranked([*_of_the_ended(graph), *(_of_request(graph, record, above) for record in living)])


def _of_the_ended(graph: WaitGraph) -> list[Wait]:
    """Return the keepers of blocks of requests that have ended, and the blocks without an owner."""
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
    """Return how many of these blocks no other request has a reference to."""
    return sum(ledger.state.refs[block] == 1 for block in blocks)
