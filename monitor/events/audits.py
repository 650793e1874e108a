"""Holds the engine's audits against the books, and puts the books right after a loss.

The engine reads out its own tables in slices between steps (AUDIT_BEGIN … AUDIT_END). In whole books a difference is
an anomaly. In damaged ones, the events of which were lost, the tables are taken over until one cycle is complete.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from monitor.events.kinds import Kind, Status
from monitor.events.records import RequestState

if TYPE_CHECKING:
    from monitor.events.state import State

UNKNOWN_HASH: Final = 1
"""Stands for a hash known to exist whose value was lost with the events that said it."""


class AuditFold:
    """Folds the AUDIT kinds into `state`."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._cycle: _Cycle | None = None

    def forget(self) -> None:
        """Events were lost: a cycle half read is worth nothing."""
        self._cycle = None

    def apply(self, kind: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        """Fold one of the AUDIT kinds in."""
        if kind == Kind.AUDIT_BEGIN:
            # What only the front end knows is not in the scheduler's tables yet.
            known = {n for n, record in self.state.requests.items() if record.status != Status.RECEIVED}
            self._cycle = _Cycle(self.state.now_ns, known)
        elif self._cycle is None:
            return  # we came in the middle of a cycle; the next one is whole
        elif kind == Kind.AUDIT_BLOCKS:
            self._blocks(args[0], ids)
        elif kind == Kind.AUDIT_REQUEST:
            self._request(number, args, ids, texts)
        else:
            self._end(*args[1:5])

    def _blocks(self, first: int, packed: list[int]) -> None:
        """The engine's table is what decides its fate, so where the books differ they say so and follow it."""
        state = self.state
        for block, value in enumerate(packed, first):
            if not 0 <= block < state.total:
                state.anomaly("block out of range", block, -1, f"the pool has {state.total}")
                return
            theirs, in_queue, hashed = value >> 2, bool(value & 2), bool(value & 1)
            ours = state.refs[block]
            if theirs != ours or hashed != bool(state.hashes[block]):
                detail = (
                    f"the engine has reference count {theirs}, {'a' if hashed else 'no'} hash; by the events {ours}"
                )
                state.anomaly("audit: block", block, state.owner[block], detail)
                self._adopt(block, theirs, hashed)
            if (theirs == 0) != in_queue:
                detail = f"reference count {theirs} and {'in' if in_queue else 'not in'} the free queue"
                state.anomaly("audit: free queue", block, state.owner[block], detail)

    def _adopt(self, block: int, refs: int, hashed: bool) -> None:
        state = self.state
        was_used, was_cached = state.refs[block] > 0, bool(state.hashes[block]) and state.refs[block] <= 0
        state.refs[block] = refs
        if hashed != bool(state.hashes[block]):
            state.hashes[block] = UNKNOWN_HASH if hashed else 0
        state.used += (refs > 0) - was_used
        state.cached_idle += (hashed and refs <= 0) - was_cached
        if refs > state.known_references(block):
            state.orphans.add(block)

    def _request(self, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]) -> None:
        state = self.state
        assert self._cycle is not None
        status, computed, outputs, holder, fence, lease_deadline_ns, detached = args[:7]
        if not detached:
            self._cycle.unseen.discard(number)
            self._cycle.seen += 1
        if ids and not 0 <= min(ids) <= max(ids) < state.total:
            state.anomaly("block out of range", max(ids), number, f"the pool has {state.total}")
            return
        record = state.requests.get(number)
        if not state.damaged:
            if detached:
                return
            if record is None:
                state.anomaly("audit: a request that the books do not have", -1, number, texts.get(number, ""))
            elif record.blocks != ids and sorted(record.blocks) != sorted(ids):
                detail = f"{len(ids)} blocks in the engine's table, {len(record.blocks)} by the events"
                state.anomaly("audit: block table", -1, number, detail)
            return
        name = texts.get(number, f"#{number}")
        if holder:
            state.defer(number, name, holder, fence, lease_deadline_ns, ids)
        if detached:
            for block in ids:
                if number not in state.detached.setdefault(block, []):
                    state.detached[block].append(number)
            return
        if record is None:
            record = RequestState(number, name, status, since_ns=state.now_ns, waited_ns={})
            state.requests[number] = record
        record.status, record.computed_tokens, record.output_tokens, record.blocks = status, computed, outputs, ids

    def _end(self, free: int, cached_idle: int, used: int, requests: int) -> None:
        state = self.state
        cycle, self._cycle = self._cycle, None
        assert cycle is not None
        state.audit_cycles += 1
        state.audited_ns = cycle.began_ns
        if state.damaged:
            self._repair(cycle)
            state.damaged = False
            state.check(free, cached_idle, used)
            return
        if cycle.seen != requests:
            state.anomaly("audit: requests", -1, -1, f"{requests} announced, {cycle.seen} read out")
        for number in cycle.unseen:
            record = state.requests.get(number)
            if record is not None and not record.is_finished:
                state.anomaly(
                    "audit: a request that the engine does not have", -1, number,
                    f"{Status(record.status).name} by the events, with {len(record.blocks)} blocks",
                )  # fmt: skip

    def _repair(self, cycle: _Cycle) -> None:
        """A whole cycle since the loss has been read: what it did not name is gone, and owners follow the tables."""
        state = self.state
        for number in cycle.unseen:
            record = state.requests.get(number)
            if record is not None:
                del state.requests[number]
        for record in list(state.requests.values()):
            # The scheduler took all of them in since: their arrival was lost, and so was all that followed.
            if record.status == Status.RECEIVED and record.received_ns < cycle.began_ns:
                del state.requests[record.number]
        state.owner[:] = array("i", [-1]) * state.total
        state.more.clear()
        for record in state.requests.values():
            for block in record.blocks:
                if state.owner[block] < 0:
                    state.owner[block] = record.number
                else:
                    state.more.setdefault(block, []).append(record.number)
        state.detached = {b: n for b, n in state.detached.items() if state.refs[b] > len(state.owners(b))}
        for number in list(state.deferrals):
            if number not in state.requests and not any(number in former for former in state.detached.values()):
                del state.deferrals[number]
        state.orphans = {b for b in range(state.total) if state.refs[b] > state.known_references(b)}
        state.recount()


class _Cycle:
    """A cycle being read: the requests that the books had when it began and that it has not named yet."""

    def __init__(self, began_ns: int, requests: set[int]) -> None:
        self.began_ns = began_ns
        self.unseen = requests
        self.seen = 0
