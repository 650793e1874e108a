"""Events one by one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from ..base.errors import BadQuestion, NotKnown
from ..base.text import timestamp
from ..contract.kinds import Kind, name_of
from ..contract.wire import Batch, Run
from ..ledger.engine_ledger import EngineLedger, Position
from ..ledger.event_history import BLOCK_KINDS, EventFilter, HistoryLine, event_text, list_events, request_names
from .recent_past import StreamTime
from .schema import EventHistoryEntry, EventView


def history_entry(line: HistoryLine) -> EventHistoryEntry:
    """One line of it."""
    return EventHistoryEntry(timestamp(line.at_ns), line.what, line.text, str(line.position))


MAX_EVENT_IDS: Final = 1_000
AROUND_NS: Final = 60_000_000_000

EventRow = tuple[Position, int, Run]


def names_until(ledger: EngineLedger, batches: Sequence[Batch]) -> dict[int, str]:
    """Return request ids by number, of all that the ledger knows and that later batches name."""
    names = request_names(ledger)
    for batch in batches:
        names.update(batch.texts)
    return names


def wanted(
    ledger: EngineLedger, names: Mapping[int, str], kinds: Sequence[str], request: str, block: int | None
) -> EventFilter:
    """Which events these words mean. Raises NotKnown, and BadQuestion for what is no kind."""
    unknown = [kind for kind in kinds if kind.upper() not in Kind.__members__]
    if unknown:
        known = ", ".join(kind.name.lower() for kind in Kind)
        raise BadQuestion(f"{unknown[0]!r} is not a kind of event; there are: {known}")
    number = None
    if request:
        record = ledger.request(request)
        named = (one for one, name in names.items() if one >= 0 and request in (name, f"#{one}"))
        number = record.number if record is not None else next(named, None)
        if number is None:
            raise NotKnown(f"{ledger.engine} has no request {request!r}, and had none of that name then or recently")
    return EventFilter([Kind[kind.upper()] for kind in kinds], number, block)


def events_between(
    batches: Sequence[Batch],
    names: Mapping[int, str],
    since: StreamTime,
    until: StreamTime,
    which: EventFilter,
    most: int,
) -> list[EventView]:
    """Return the last `most` from `since` until just before `until`."""
    found: list[EventRow] = []
    for rows in list_events(reversed([batch for batch in batches if since.at_ns <= batch.wall_ns]), which):
        found[:0] = [row for row in rows if _from(row, since) and not _from(row, until)]
        if len(found) >= most:
            break
    return _views(names, found[-most:])


def events_around(
    batches: Sequence[Batch], names: Mapping[int, str], moment: StreamTime, which: EventFilter, most: int
) -> list[EventView]:
    """Return the half of `most` until the moment, itself among them, and as many after it."""
    middle = bisect_right(batches, moment.at_ns, key=lambda batch: batch.wall_ns)
    if moment.position is not None:
        place = moment.position[:2]
        middle = bisect_right(batches, place, key=lambda batch: (batch.epoch, batch.sequence))
    before: list[EventRow] = []
    after: list[EventRow] = []
    for rows in list_events(reversed(batches[:middle]), which):
        before[:0] = [row for row in rows if not _after(row, moment)]
        after[:0] = [row for row in rows if _after(row, moment)]
        if len(before) >= most - most // 2:
            break
    for rows in list_events(batches[middle:], which):
        if len(after) >= most // 2:
            break
        before += [row for row in rows if not _after(row, moment)]
        after += [row for row in rows if _after(row, moment)]
    return _views(names, before[-(most - most // 2) :] + after[: most // 2])


def _from(row: EventRow, moment: StreamTime) -> bool:
    return row[0] >= moment.position if moment.position is not None else row[1] >= moment.at_ns


def _after(row: EventRow, moment: StreamTime) -> bool:
    return row[0] > moment.position if moment.position is not None else row[1] > moment.at_ns


def _views(names: Mapping[int, str], rows: Sequence[EventRow]) -> list[EventView]:
    return [
        EventView(
            position=str(position),
            at=timestamp(at_ns),
            kind=name_of(Kind, event.kind).lower(),
            text=event_text(event, names),
            request=names.get(event.request, f"#{event.request}") if event.request >= 0 else "",
            blocks=event.ids[:MAX_EVENT_IDS] if event.kind in BLOCK_KINDS else [],
            block_count=len(event.ids) if event.kind in BLOCK_KINDS else 0,
        )
        for position, at_ns, event in rows
    ]
