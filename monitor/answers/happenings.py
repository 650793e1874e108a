"""What happened, event by event."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from monitor.answers import BadQuestion, NotKnown
from monitor.answers.moments import Moment
from monitor.events.kinds import Kind, name_of
from monitor.events.wire import Run
from monitor.ledger.ledger import EngineLedger, Position
from monitor.ledger.listing import Wanted, in_words, listed
from monitor.ledger.story import BLOCK_KINDS, names_in
from monitor.ledger.words import timestamp
from monitor.views import EventView

MOST_IDS: Final = 1_000
AROUND_NS: Final = 60_000_000_000

Row = tuple[Position, int, Run]


def wanted(ledger: EngineLedger, kinds: Sequence[str], request: str, block: int | None) -> Wanted:
    """Which events these words mean. Raises NotKnown, and BadQuestion for what is no kind."""
    unknown = [kind for kind in kinds if kind.upper() not in Kind.__members__]
    if unknown:
        known = ", ".join(kind.name.lower() for kind in Kind)
        raise BadQuestion(f"{unknown[0]!r} is no kind of event; there are: {known}")
    number = None
    if request:
        record = ledger.request(request)
        if record is None:
            raise NotKnown(f"{ledger.engine} has no request {request!r}, nor had one of that name then or of late")
        number = record.number
    return Wanted([Kind[kind.upper()] for kind in kinds], number, block)


def events_between(ledger: EngineLedger, since: Moment, until: Moment, which: Wanted, most: int) -> list[EventView]:
    """The last `most` from `since` until just before `until`, of the batches that the ledger has."""
    found: list[Row] = []
    batches = [batch for batch in ledger.recent if since.at_ns <= batch.wall_ns]
    for rows in listed(reversed(batches), which):
        found[:0] = [row for row in rows if _from(row, since) and not _from(row, until)]
        if len(found) >= most:
            break
    return _views(ledger, found[-most:])


def events_around(ledger: EngineLedger, moment: Moment, which: Wanted, most: int) -> list[EventView]:
    """The half of `most` until the moment, itself among them, and as many after it; at most AROUND_NS away."""
    batches = [batch for batch in ledger.recent if abs(batch.wall_ns - moment.at_ns) <= AROUND_NS]
    middle = bisect_right(batches, moment.at_ns, key=lambda batch: batch.wall_ns)
    if moment.position is not None:
        place = moment.position[:2]
        middle = bisect_right(batches, place, key=lambda batch: (batch.epoch, batch.sequence))
    before: list[Row] = []
    after: list[Row] = []
    for rows in listed(reversed(batches[:middle]), which):
        before[:0] = [row for row in rows if not _after(row, moment)]
        after[:0] = [row for row in rows if _after(row, moment)]
        if len(before) >= most - most // 2:
            break
    for rows in listed(batches[middle:], which):
        if len(after) >= most // 2:
            break
        before += [row for row in rows if not _after(row, moment)]
        after += [row for row in rows if _after(row, moment)]
    return _views(ledger, before[-(most - most // 2) :] + after[: most // 2])


def _from(row: Row, moment: Moment) -> bool:
    return row[0] >= moment.position if moment.position is not None else row[1] >= moment.at_ns


def _after(row: Row, moment: Moment) -> bool:
    return row[0] > moment.position if moment.position is not None else row[1] > moment.at_ns


def _views(ledger: EngineLedger, rows: Sequence[Row]) -> list[EventView]:
    names = names_in(ledger)
    return [
        EventView(
            position=str(position),
            at=timestamp(at_ns),
            kind=name_of(Kind, event.kind).lower(),
            text=in_words(event, names),
            request=names.get(event.request, f"#{event.request}") if event.request >= 0 else "",
            blocks=event.ids[:MOST_IDS] if event.kind in BLOCK_KINDS else [],
            block_count=len(event.ids) if event.kind in BLOCK_KINDS else 0,
        )
        for position, at_ns, event in rows
    ]
