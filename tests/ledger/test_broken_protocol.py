"""A ledger bends and does not break: whatever an engine reports, each block counts once, and an audit puts it right.

The events are well-formed and otherwise by chance: blocks freed by others, twice or never, handed out while held,
tables that lose their entries, requests that come from nowhere and vanish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.monitor.contract.kinds import FIRST_FINISHED, Cause, Holder, Kind, Release, Stage, Status
from kvscope.monitor.contract.wire import NO_REQUEST, PINS, Run, batch_of
from kvscope.monitor.ledger.balance import Balance, balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.engine_state import EngineState
from kvscope.monitor.ledger.keyframe_codec import dump_state, load_state

TOTAL: Final = 7
ENGINE: Final = "any@127.0.0.1:8000/0"
REQUESTS: Final = range(1, 4)
numbers = st.sampled_from([*REQUESTS, *REQUESTS, NO_REQUEST])
blocks = st.lists(st.integers(1, TOTAL - 1), min_size=1, max_size=4)
times = st.integers(1, 1000)
unlike_blocks = st.lists(st.integers(1, TOTAL - 1), min_size=1, max_size=4, unique=True)


def of_request(kind: Kind, *args: int | st.SearchStrategy[int]) -> st.SearchStrategy[Run]:
    """Events of this kind about a request's blocks."""
    values = st.tuples(*(arg if isinstance(arg, st.SearchStrategy) else st.just(arg) for arg in args))
    return st.builds(lambda n, a, ids: Run(kind, 0, n, [*a], ids), numbers, values, blocks)


def of_life(kind: Kind, *args: int) -> st.SearchStrategy[Run]:
    """Events of this kind about a request alone."""
    return st.builds(lambda number: Run(kind, 0, number, [*args], []), st.sampled_from(REQUESTS))


def of_pool(kind: Kind, *args: int) -> st.SearchStrategy[Run]:
    """Events of this kind about blocks of no request."""
    return st.builds(lambda ids: Run(kind, 0, NO_REQUEST, [*args], ids), blocks)


cached = st.builds(lambda n, ids: Run(Kind.CACHED, 0, n, [100 + block for block in ids], ids), numbers, unlike_blocks)
event = st.one_of(
    of_life(Kind.ARRIVED, 1, 8, 8, 0, 2, 4),
    of_life(Kind.ADMITTED, 0),
    of_life(Kind.QUEUED, Cause.NEW, 0),
    of_life(Kind.FINISHED, Status.FINISHED_STOPPED),
    of_life(Kind.PREEMPTED, 1, NO_REQUEST, 2, 4),
    of_life(Kind.COMPLETION_DELIVERED, 5),
    of_request(Kind.ALLOCATED),
    of_request(Kind.REUSED),
    of_request(Kind.RELEASED, st.sampled_from([Release.FINISHED, Release.PREEMPTED, Release.TRANSFER_DONE])),
    of_request(Kind.DETACHED),
    of_request(Kind.FREE_DEFERRED, st.sampled_from([Holder.CONNECTOR, Holder.FENCE]), 9, 0),
    of_pool(Kind.RECLAIMED, Release.TRANSFER_DONE),
    of_pool(Kind.PINNED),
    of_pool(Kind.UNPINNED),
    of_pool(Kind.EVICTED, 1),
    cached,
)
batches = st.lists(st.lists(event, min_size=1, max_size=6), max_size=8)
tables = st.dictionaries(st.sampled_from(REQUESTS), st.lists(st.integers(1, TOTAL - 1), max_size=4), max_size=3)
counts = st.lists(st.integers(-1, 4), min_size=TOTAL - 1, max_size=TOTAL - 1)


class Told:
    """A ledger and what an engine tells it, a batch at a time. Every invariant is checked after each."""

    def __init__(self) -> None:
        self.ledger = EngineLedger(ENGINE, validate=True)
        self.say([Run(Kind.STARTED, 0, NO_REQUEST, [1, TOTAL, 1, 4], [])])

    @property
    def state(self) -> EngineState:
        return self.ledger.state

    def say(self, events: list[Run]) -> None:
        at_ns = (self.ledger.sequence + 2) * 1_000_000
        events = [Run(Kind.CLOCK, 0, NO_REQUEST, [at_ns], []), *events]
        sequence = self.ledger.sequence + 1
        self.ledger.apply(
            batch_of(ENGINE, 1, events, sequence=sequence, wall_ns=1_700_000_000_000_000_000 + at_ns, mono_ns=at_ns)
        )
        assert self.ledger.sequence == sequence
        if not self.state.damaged:
            adds_up(self.state)

    def lose(self) -> None:
        """The events of a batch are lost for good, later than all that was received."""
        self.say([])
        self.ledger.apply(batch_of(ENGINE, 1, [Run(Kind.LOST, 0, NO_REQUEST, [9, 9, Stage.TRANSPORT], [])]))
        assert self.state.damaged

    def audit(self, refs: list[int], held: Mapping[int, list[int]]) -> None:
        """The engine reads these reference counts, of the blocks from 1 on, and these tables out."""
        packed = [count * 4 + (2 if count <= 0 else 0) for count in refs]
        lines = [Run(Kind.AUDIT_BEGIN, 0, NO_REQUEST, [1], []), Run(Kind.AUDIT_BLOCKS, 0, NO_REQUEST, [1], packed)]
        for number, table in held.items():
            args = [Status.RUNNING, 0, 0, 0, 0, 0, 0]
            lines.append(Run(Kind.AUDIT_REQUEST, 0, number, args, table))
        used = sum(count > 0 for count in refs)
        lines.append(Run(Kind.AUDIT_END, 0, NO_REQUEST, [1, TOTAL - 1 - used, 0, used, len(held)], []))
        self.say(lines)


def adds_up(state: EngineState) -> None:
    parts = balance_of(state)
    assert parts.holds
    assert min(*(getattr(parts, name) for name in Balance.__struct_fields__), *state.refs) >= 0


def is_kept_by_a_keyframe(state: EngineState) -> None:
    again = load_state(dump_state(state))
    assert balance_of(again) == balance_of(state)
    assert (again.stale, again.dropped.keys(), again.told) == (state.stale, state.dropped.keys(), state.told)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches, st.lists(st.tuples(counts, tables), max_size=2))
def test_no_sequence_of_events_breaks_the_account(
    said: list[list[Run]], audits: list[tuple[list[int], dict[int, list[int]]]]
) -> None:
    told = Told()
    for index, events in enumerate(said):
        told.say(events)
        if index < len(audits):
            told.audit(*audits[index])
    is_kept_by_a_keyframe(told.state)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches, tables, counts)
def test_an_audit_of_tables_that_can_be_is_adopted_and_told_once(
    said: list[list[Run]], held: dict[int, list[int]], surplus: list[int]
) -> None:
    told = Told()
    for events in said:
        told.say(events)
    state = told.state
    held, refs = engine_of(state, held, surplus)
    told.audit(refs, held)
    found = len(told.ledger.anomalies)
    told.audit(refs, held)
    assert len(told.ledger.anomalies) == found
    assert state.refs == [0, *refs]
    assert not state.stale
    for number in held:
        assert sorted(state.requests[number].blocks) == sorted(held[number])
    lost = {n for n, r in state.requests.items() if r.status < FIRST_FINISHED and r.not_queued_ns}
    assert lost == {n for n, r in state.requests.items() if r.status < FIRST_FINISHED} - held.keys()
    goes_on_exactly(told, held)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(batches, tables, counts)
def test_an_audit_after_a_loss_is_adopted_and_accuses_nobody(
    said: list[list[Run]], held: dict[int, list[int]], surplus: list[int]
) -> None:
    told = Told()
    for events in said:
        told.say(events)
    told.lose()
    state, found, dropped = told.state, len(told.ledger.anomalies), {*told.state.dropped}
    held, refs = engine_of(state, held, surplus)
    told.audit(refs, held)
    assert not state.damaged
    assert len(told.ledger.anomalies) == found
    assert dropped >= state.dropped.keys()
    assert not state.stale
    assert state.refs == [0, *refs]
    assert {number: sorted(record.blocks) for number, record in state.requests.items() if not record.is_finished} == {
        number: sorted(table) for number, table in held.items()
    }
    goes_on_exactly(told, held)


def engine_of(
    state: EngineState, held: dict[int, list[int]], surplus: list[int]
) -> tuple[dict[int, list[int]], list[int]]:
    """Return tables that an engine can have after the state's events, and the reference counts that go with them.
    surplus: by block from 1 on, references beyond those of tables and of what left them.
    """
    held = {number: table for number, table in held.items() if number not in state.requests or state.is_alive(number)}
    named = Counter(block for table in held.values() for block in table)
    outside = {block: len(former) for block, former in state.detached.items()}
    return held, [named[block] + outside.get(block, 0) + max(surplus[block - 1], 0) for block in range(1, TOTAL)]


def goes_on_exactly(told: Told, held: dict[int, list[int]]) -> None:
    """All requests that the engine has free what they have, and no anomaly follows."""
    found = len(told.ledger.anomalies)
    before = Counter(dict(enumerate(told.state.refs)))
    told.say([Run(Kind.RELEASED, 0, number, [Release.PREEMPTED], table) for number, table in held.items() if table])
    before.subtract(block for table in held.values() for block in table)
    assert told.state.refs == [before[block] for block in range(TOTAL)]
    assert len(told.ledger.anomalies) == found
    assert PINS not in told.state.requests
