"""The invariants of an EngineState that no lost event has damaged, whatever rules the engine breaks.

    counters     `used` and `cached_idle` equal what the columns show
    references   a block has exactly the references of its known holders; orphans may have more
    tables       a block's owners are the requests whose tables name it
    reserved     no request holds a reserved block
    requests     a finished request without blocks is forgotten; a request is kept under its own number
    deferrals    a deferred block is in the table of its request, or left it without becoming free
    steps        steps in flight and fences are later than the last complete step

Set KVSCOPE_VALIDATE=1, or construct `EngineLedger(engine, validate=True)`, to check them after every batch. It is for
tests and for hunting a defect of kvscope: a check costs O(blocks), most of it in C, and a service that raises stops
following the engine. In production the finding corrupt.conservation and the gauge
kvscope_conservation_difference_blocks watch the sum of the pool instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import compress
from operator import not_
from typing import Final, NamedTuple

from ..contract.kinds import Kind, name_of
from ..contract.wire import Batch
from .balance import balance_of
from .engine_state import EngineState


class Violation(NamedTuple):
    """A broken invariant: its name, the block and request concerned (-1: none), and the two values that differ."""

    invariant: str
    block: int
    request: int
    detail: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.detail}"


def violations(state: EngineState) -> Iterator[Violation]:
    """Yield the broken invariants. O(blocks + references)."""
    yield from _counters(state)
    yield from _references(state)
    yield from _tables(state)
    yield from _requests(state)
    yield from _deferrals(state)
    yield from _check_steps(state)


def disputed_blocks(state: EngineState) -> list[int]:
    """Return the blocks whose references differ from their known holders, lowest first. O(blocks)."""
    tables: dict[int, int] = dict.fromkeys(state.detached, 0)
    for block, former in state.detached.items():
        tables[block] += len(former)
    for record in state.requests.values():
        for block in record.blocks:
            tables[block] = tables.get(block, 0) + 1
    held = {block for block, refs in enumerate(state.refs) if refs} | tables.keys()
    return sorted(b for b in held if state.refs[b] != tables.get(b, 0) and b not in state.orphans)


def _counters(state: EngineState) -> Iterator[Violation]:
    used = state.total - state.refs.count(0)
    if used != state.used:
        yield Violation("counters", -1, -1, f"{used} blocks have references, {state.used} are counted as used")
    cached_idle = sum(compress(map(not_, state.refs), state.hashes))
    if cached_idle != state.cached_idle:
        detail = f"{cached_idle} unused blocks have a hash, {state.cached_idle} are counted as cached-idle"
        yield Violation("counters", -1, -1, detail)
    if any(state.refs[: state.reserved]):
        yield Violation("reserved", 0, -1, f"references to the {state.reserved} reserved blocks")


def _references(state: EngineState) -> Iterator[Violation]:
    known = state.total - state.owner.count(-1) + sum(map(len, state.more.values()))
    known += sum(map(len, state.detached.values()))
    surplus = sum(state.refs[block] - state.known_references(block) for block in state.orphans)
    if sum(state.refs) == known + surplus and not any(compress(map(not_, state.refs), map((-1).__ne__, state.owner))):
        return
    for block in range(state.total):
        refs, holders = state.refs[block], state.known_references(block)
        if refs < holders or (refs > holders and block not in state.orphans):
            yield Violation("references", block, state.owner[block], f"block {block}: {refs} for {holders} holders")


def _tables(state: EngineState) -> Iterator[Violation]:
    owner, more = state.owner, state.more
    entries = 0
    for record in state.requests.values():
        entries += len(record.blocks)
        for block in record.blocks:
            if owner[block] != record.number and record.number not in more.get(block, ()):
                detail = f"block {block} is in the table of {record.id}, its owners are {state.owners(block)}"
                yield Violation("tables", block, record.number, detail)
    owned = state.total - owner.count(-1) + sum(map(len, more.values()))
    if owned == entries:
        return
    tables = {number: set(record.blocks) for number, record in state.requests.items()}
    for block in range(state.total):
        for number in state.owners(block):
            if block not in tables.get(number, ()):
                detail = f"block {block} has the owner #{number}, whose table does not name it"
                yield Violation("tables", block, number, detail)


def _requests(state: EngineState) -> Iterator[Violation]:
    for number, record in state.requests.items():
        if record.number != number:
            yield Violation("requests", -1, number, f"{record.id} is kept under #{number}")
        if record.is_finished and not record.blocks:
            yield Violation("requests", -1, number, f"{record.id} is finished, holds nothing and is kept")


def _deferrals(state: EngineState) -> Iterator[Violation]:
    for number, deferral in state.deferrals.items():
        record = state.requests.get(number)
        if record is None:  # all its blocks left the table, or the engine never announced the request
            continue
        for block in deferral.blocks.difference(record.blocks):
            if number not in state.detached.get(block, ()):
                yield Violation("deferrals", block, number, f"block {block} is deferred for {deferral.id}, which left")


def _check_steps(state: EngineState) -> Iterator[Violation]:
    for step in (*state.in_flight, *state.fences):
        if step <= state.last_step:
            yield Violation("steps", -1, -1, f"step {step} is in flight, step {state.last_step} is complete")


VARIABLE: Final = "KVSCOPE_VALIDATE"
MAX_ERROR_EVENTS: Final = 12


class InvariantError(Exception):
    """A ledger's state is impossible although its events are complete and consistent: a defect of kvscope."""

    def __init__(self, engine: str, position: str, violation: Violation, history: list[str]) -> None:
        self.violation = violation
        self.history = history
        """The last events about the block and the request concerned, oldest first."""
        events = "".join(f"\n  {line}" for line in history) or "\n  no event is about it"
        super().__init__(f"{engine} at {position}: {violation}{events}")


def is_enabled() -> bool:
    """Whether the environment switches validation on."""
    return os.environ.get(VARIABLE, "") not in ("", "0")


def validate(engine: str, position: str, state: EngineState, recent: Iterable[Batch]) -> None:
    """Raise InvariantError if an invariant of the state is broken. `recent`: the batches that led to it.

    A ledger that lost events, or whose engine contradicted itself (an anomaly), has nothing to validate.
    """
    for violation in _all_violations(state):
        raise InvariantError(engine, position, violation, list(_history(recent, violation))[-MAX_ERROR_EVENTS:])


def _all_violations(state: EngineState) -> Iterator[Violation]:
    yield from violations(state)
    parts = balance_of(state)
    if not parts.holds:
        yield Violation("conservation", -1, -1, f"the states add up to {parts.difference:+} blocks of the total")


def _history(recent: Iterable[Batch], violation: Violation) -> Iterator[str]:
    for batch in recent:
        for index, event in enumerate(batch.events()):
            is_about_block = violation.block in event.ids and event.kind != Kind.PROGRESSED
            if is_about_block or violation.request == event.request >= 0:
                name = name_of(Kind, event.kind)
                yield f"{batch.epoch}/{batch.sequence}/{index} {name} #{event.request} {event.args} {event.ids}"
