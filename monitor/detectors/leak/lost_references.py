"""References that no living request and no announced deferral owns, split in two.

leak.unaccounted: a request has ended and its blocks were not freed, or the engine's block table lost them while it
lived, and they are still in use. leak.rising-floor: a free forgets something, requests end well but for a block or two,
and each drain to idle leaves more of these in use than the one before. A block or two do no harm, but a trend does:
until the floor has risen some times they are leak.unaccounted too. An audit since then confirms either.

`leaked_blocks` adds what a connector keeps for too long: no living request holds these blocks, and none of their
holders is expected to free them. What may be the first transfers of an engine, and slow, is not among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from ...ledger.engine_ledger import EngineLedger
from ...ledger.records import DroppedTable, RequestState
from ..detector import Settings, Threshold
from .deferred_blocks import kept, may_be_first_transfers, overdue_sends

MIN_RISES: Final = Threshold(
    3, "drains", "a floor that is higher than the last three times over, and never lower, is not left by chance"
)
"""A threshold of leak.rising-floor. Anything short of a trend is leak.unaccounted."""
UNACCOUNTED_GRACE_S: Final = Threshold(
    2, "s", "a free may be reported in the batch after the one that ended its request"
)
"""A threshold of leak.unaccounted."""


class LostReferences(NamedTuple):
    """Some of the references without an owner, by block, and the requests that left them: at their end (`culprits`), or
    before it, when the engine's table lost them (`dropped`).
    """

    references: Mapping[int, int]
    culprits: list[RequestState]
    dropped: Sequence[DroppedTable] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The ids of the requests."""
        return tuple(dict.fromkeys([*(record.id for record in self.culprits), *(one.id for one in self.dropped)]))

    def since_ns(self, ledger: EngineLedger) -> int:
        """When the first of them was left, wall time."""
        left = [ledger.wall(record.finished_ns) for record in self.culprits if record.finished_ns]
        left += [ledger.wall(dropped.since_ns) for dropped in self.dropped]
        since = ledger.state.since
        return min(left, default=ledger.wall(min((since[block] for block in self.references), default=0)))

    def first_at(self, ledger: EngineLedger) -> str:
        """Return the position of the first: of the end of the request that left it, or of the audit that showed it."""
        left = [(record.finished_ns, record.since_at) for record in self.culprits]
        left += [(dropped.since_ns, dropped.since_at) for dropped in self.dropped]
        return ledger.at(min(left)[1] if left else ledger.state.places.audited)

    def last_at(self, ledger: EngineLedger) -> str:
        """Return the position where the last request left some."""
        left_at = [*(record.since_at for record in self.culprits), *(one.since_at for one in self.dropped)]
        return ledger.at(*left_at) or self.first_at(ledger)

    def certain(self, ledger: EngineLedger) -> LostReferences:
        """Return those of them that no lost event can have freed."""
        state = ledger.state
        if not state.damaged:
            return self
        certain = {block: count for block, count in self.references.items() if state.is_certain_block(block)}
        return LostReferences(
            certain,
            [record for record in self.culprits if not certain.keys().isdisjoint(record.blocks)],
            [dropped for dropped in self.dropped if not certain.keys().isdisjoint(dropped.blocks)],
        )


class LostByCode(NamedTuple):
    """The lost references of each code, or None where there are none."""

    rising: LostReferences | None
    unaccounted: LostReferences | None


def lost_references(ledger: EngineLedger, settings: Settings) -> LostByCode:
    """Find the references that no owner explains, and which of the two codes they are."""
    unexplained: Mapping[int, int] = ledger.unexplained_references()
    if not unexplained:
        return LostByCode(None, None)
    culprits = [
        record
        for record in ledger.state.requests.values()
        if record.is_finished and not unexplained.keys().isdisjoint(record.blocks)
    ]
    rising = None
    if len(ledger.floors.rising()) > settings(MIN_RISES):
        forgotten = [record for record in culprits if len(record.blocks) < record.ended_blocks]
        skipped = [record for record in culprits if len(record.blocks) >= record.ended_blocks]
        some = _blocks_of(forgotten) - _blocks_of(skipped)
        of_floor = {block: count for block, count in unexplained.items() if block in some}
        if of_floor:
            rising = LostReferences(of_floor, forgotten)
        unexplained = {block: count for block, count in unexplained.items() if block not in some}
        culprits = skipped
    dropped = [one for one in ledger.state.dropped.values() if not unexplained.keys().isdisjoint(one.blocks)]
    return LostByCode(rising, LostReferences(unexplained, culprits, dropped) if unexplained else None)


def _blocks_of(records: Iterable[RequestState]) -> set[int]:
    return {block for record in records for block in record.blocks}


def audited_since(ledger: EngineLedger, since_ns: int) -> bool:
    """Return whether an audit has confirmed the ledger since then (wall ns)."""
    state = ledger.state
    return bool(state.audited_ns) and ledger.wall(state.audited_ns) >= since_ns and not state.damaged


NO_AUDIT_SINCE = "an audit of the engine's own reference counts since then (the next one runs by itself)"


class LeakedBlocks(NamedTuple):
    """The blocks, and whether nothing but a defect frees them: a connector that shows no lease may yet."""

    blocks: frozenset[int]
    for_good: bool


def leaked_blocks(ledger: EngineLedger, settings: Settings) -> LeakedBlocks:
    """Return the blocks that no owner explains, and those that a connector keeps for too long."""
    late, pending = overdue_sends(ledger, settings)
    pending = pending or may_be_first_transfers(ledger, settings, kept(ledger, late))
    sending: set[int] = set() if pending else set().union(*(deferral.blocks for deferral in late))
    return LeakedBlocks(frozenset(sending.union(_lost(ledger, settings(UNACCOUNTED_GRACE_S)))), not sending)


def _lost(ledger: EngineLedger, grace_s: float) -> list[int]:
    """Return the blocks that no owner explains, for so long: since the end of the request that left them, however long
    it had used them before.
    """
    state = ledger.state
    unaccounted = state.unaccounted()
    if not unaccounted:
        return []
    ended = {b: r.finished_ns for r in state.requests.values() if r.is_finished for b in r.blocks}
    return [block for block in unaccounted if ledger.age_s(ended.get(block, state.since[block])) >= grace_s]
