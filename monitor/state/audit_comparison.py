"""Holds the engine's audits against the books, and puts the books right after a loss.

The engine reads out its own tables in slices between steps (AUDIT_BEGIN … AUDIT_END). In whole books a difference is
an anomaly. In damaged ones, the events of which were lost, the tables are taken over until one cycle is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvscope.monitor.events.kinds import CAUSE_OF, Cause, Kind, Status
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.state.tables import Books

UNKNOWN_HASH: Final = 1
"""Stands for a hash known to exist whose value was lost with the events that said it."""


class AuditFold:
    """Folds the AUDIT kinds into books. It is theirs and does not know them: a state that nobody needs any more is gone
    at once, and with it the columns of its blocks, not when the garbage collector comes by.
    """

    def __init__(self) -> None:
        self._cycle: _Cycle | None = None

    def forget(self) -> None:
        """Events were lost: a cycle half read is worth nothing."""
        self._cycle = None

    def apply(
        self,
        books: Books,
        kind: int,
        group: int,
        number: int,
        args: list[int],
        ids: list[int],
        texts: Mapping[int, str],
    ) -> None:
        """Fold one of the AUDIT kinds in."""
        if kind == Kind.AUDIT_BEGIN:
            # What only the front end knows is not in the scheduler's tables yet.
            known = {n for n, record in books.requests.items() if record.status != Status.RECEIVED}
            self._cycle = _Cycle(books.now_ns, known)
        elif self._cycle is None:
            return  # we came in the middle of a cycle; the next one is whole
        elif kind == Kind.AUDIT_BLOCKS:
            self._blocks(books, args[0], ids)
        elif kind == Kind.AUDIT_REQUEST:
            self._request(books, group, number, args, ids, texts)
        else:
            self._end(books, *args[1:5])

    def _blocks(self, books: Books, first: int, packed: list[int]) -> None:
        """The engine's table is what decides its fate, so where the books differ they say so and follow it."""
        if first >= 0 and packed == self._expected(books, first, len(packed)):
            return
        for block, value in enumerate(packed, first):
            if not 0 <= block < books.total:
                books.anomaly("block out of range", block, -1, f"the pool has {books.total}")
                return
            theirs, in_queue, hashed = value >> 2, bool(value & 2), bool(value & 1)
            ours = books.refs[block]
            if theirs != ours or hashed != bool(books.hashes[block]):
                detail = (
                    f"the engine has reference count {theirs}, {'a' if hashed else 'no'} hash; by the events {ours}"
                )
                books.anomaly("audit: block", block, books.owner[block], detail)
                self._adopt(books, block, theirs, hashed)
            if (theirs == 0) != in_queue:
                detail = f"reference count {theirs} and {'in' if in_queue else 'not in'} the free queue"
                books.anomaly("audit: free queue", block, books.owner[block], detail)

    def _expected(self, books: Books, first: int, count: int) -> list[int]:
        """What an engine that these books are right of says of so many blocks."""
        refs, hashes = books.refs[first : first + count], books.hashes[first : first + count]
        return [ours << 2 | (not ours) << 1 | (value != 0) for ours, value in zip(refs, hashes, strict=True)]

    def _adopt(self, books: Books, block: int, refs: int, hashed: bool) -> None:
        books.stays = None  # who counts stays must look again
        books.places.pool = books.here
        was_used, was_cached = books.refs[block] > 0, bool(books.hashes[block]) and books.refs[block] <= 0
        books.refs[block] = refs
        if hashed != bool(books.hashes[block]):
            books.hashes[block] = UNKNOWN_HASH if hashed else 0
        books.used += (refs > 0) - was_used
        books.cached_idle += (hashed and refs <= 0) - was_cached
        if refs > books.known_references(block):
            books.orphans.add(block)

    def _request(
        self, books: Books, group: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]
    ) -> None:
        assert self._cycle is not None
        status, computed, outputs, holder, fence, lease_deadline_ns, detached = args[:7]
        if not detached:
            if group:
                self._cycle.others.setdefault(number, []).extend(ids)
                return
            ids = ids + self._cycle.others.pop(number, [])
            self._cycle.unseen.discard(number)
            self._cycle.seen += 1
        record = books.requests.get(number)
        if not books.damaged and record is not None and record.blocks == ids and not detached:
            return
        if ids and not 0 <= min(ids) <= max(ids) < books.total:
            books.anomaly("block out of range", max(ids), number, f"the pool has {books.total}")
            return
        if not books.damaged:
            if detached:
                return
            if record is None:
                books.anomaly("audit: a request that the books do not have", -1, number, texts.get(number, ""))
            elif sorted(record.blocks) != sorted(ids):
                detail = f"{len(ids)} blocks in the engine's table, {len(record.blocks)} by the events"
                books.anomaly("audit: block table", -1, number, detail)
            return
        name = texts.get(number, f"#{number}")
        if holder:
            books.defer(number, name, holder, fence, lease_deadline_ns, ids)
        if detached:
            for block in ids:
                if number not in books.detached.setdefault(block, []):
                    books.detached[block].append(number)
            return
        if record is None:
            record = RequestState(number, name, since_ns=books.now_ns, waited_ns={})
            books.requests[number] = record
        if record.status != status:  # since when, and why, was said where nobody heard it
            record.cause, record.since_ns, record.stalled_ns = CAUSE_OF.get(status, Cause.NONE), books.now_ns, 0
            record.since_at = books.here
        record.status, record.computed_tokens, record.output_tokens, record.blocks = status, computed, outputs, ids

    def _end(self, books: Books, free: int, cached_idle: int, used: int, requests: int) -> None:
        cycle, self._cycle = self._cycle, None
        assert cycle is not None
        books.audit_cycles += 1
        books.audited_ns, books.places.audited = cycle.began_ns, books.here
        if books.damaged:
            self._repair(books, cycle)
            books.damaged = False
            books.places.moved = books.places.pool = books.here
            books.check(free, cached_idle, used)
            return
        if cycle.seen != requests:
            books.anomaly("audit: requests", -1, -1, f"{requests} announced, {cycle.seen} read out")
        for number in cycle.unseen:
            record = books.requests.get(number)
            if record is not None and not record.is_finished:
                books.anomaly(
                    "audit: a request that the engine does not have",
                    -1,
                    number,
                    f"{Status(record.status).name} by the events, with {len(record.blocks)} blocks",
                )

    def _repair(self, books: Books, cycle: _Cycle) -> None:
        """A whole cycle since the loss has been read: what it did not name is gone, and owners follow the tables."""
        for number in cycle.unseen:
            record = books.requests.get(number)
            if record is not None:
                del books.requests[number]
        for record in list(books.requests.values()):
            # The scheduler took all of them in since: their arrival was lost, and so was all that followed.
            if record.status == Status.RECEIVED and record.received_ns < cycle.began_ns:
                del books.requests[record.number]
        books.owner[:] = [-1] * books.total
        books.more.clear()
        for record in books.requests.values():
            for block in record.blocks:
                if books.owner[block] < 0:
                    books.owner[block] = record.number
                else:
                    books.more.setdefault(block, []).append(record.number)
        books.detached = {b: n for b, n in books.detached.items() if books.refs[b] > len(books.owners(b))}
        for number, deferral in list(books.deferrals.items()):
            record = books.requests.get(number)
            in_table = record.blocks if record is not None and record.is_finished else []
            deferral.blocks.intersection_update(
                {*in_table, *(block for block in deferral.blocks if number in books.detached.get(block, ()))}
            )
            if not deferral.blocks:
                del books.deferrals[number]
        books.fences_anew()
        books.orphans = {b for b in range(books.total) if books.refs[b] > books.known_references(b)}
        books.recount()


class _Cycle:
    """A cycle being read: the requests that the books had when it began and that it has not named yet."""

    def __init__(self, began_ns: int, requests: set[int]) -> None:
        self.began_ns = began_ns
        self.unseen = requests
        self.seen = 0
        self.others: dict[int, list[int]] = {}
        """Blocks of the request that is being read in other groups than the first, which comes last."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Cycle:
        """All in it are numbers, of thousands of requests, which need not be copied one by one."""
        other = _Cycle(self.began_ns, self.unseen.copy())
        other.seen, other.others = self.seen, {number: blocks.copy() for number, blocks in self.others.items()}
        return other
