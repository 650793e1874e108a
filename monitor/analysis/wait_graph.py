"""The wait-for graph: for each request, the resource that it waits for, who holds that, and whether the holder moves.

A holder makes progress in its own unit: a running request in tokens, a step in time against the longest seen, a
connector in polls and transfers, a compiler in grammars. The graph names cycles and holders that stand still. It has no
thresholds: how long a holder may stand still is for detectors to judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from kvscope.monitor.events.kinds import Cause, Holder, Status
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import was_found_behind
from kvscope.monitor.state.outside_waits import WaitHistory
from kvscope.monitor.state.records import Deferral, RequestState

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
    """One that holds what a request waits for.

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

    def still_holders(self) -> Iterator[tuple[WaitsFor, WaitHolder]]:
        """Yield each wait with a holder that made no progress when it last could."""
        for record in self.ledger.living().waiting:
            edge = self.waits_for(record)
            for holder in edge.holders if edge is not None else ():
                if holder.moves is False:
                    yield edge, holder  # type: ignore[misc]

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
        """One that keeps the blocks of a request that has ended."""
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
