"""`monitor explain event`: an event by its position, what happened around it, and what it was about just after it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from kvscope.monitor.errors import NotKnown
from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.query import Query
from kvscope.monitor.schema import BlockDetail, EngineView, EventView, RequestDetail

POSITION: Final = re.compile(r"\d{1,20}/\d{1,15}/\d{1,9}")
"""The position of an event: the epoch of its engine, the batch, and the event within it."""
AROUND: Final = 9
ALL_KINDS: Final = tuple(kind.name.lower() for kind in Kind)


class EventReport(msgspec.Struct, frozen=True):
    """An event. `around`: what happened before and after it, itself among them. Just after it: the engine's pool and
    queues, the request that it is about, if any, and the first of its blocks, if any.
    """

    engine: str
    event: EventView
    around: list[EventView]
    pool: EngineView
    request: RequestDetail | None
    block: BlockDetail | None


def event_at(query: Query, engines: Sequence[str], position: str) -> EventReport:
    """Return the event at this position in the stream of one of these engines. Raises NotKnown, and ValueError for what
    is not a position of an event.
    """
    if not POSITION.fullmatch(position):
        raise ValueError(
            f"{position!r} is not a position of an event: give epoch/sequence/event, as evidence has it (--format json)"
        )
    refused: NotKnown | None = None
    for engine in engines:
        try:
            return _report(query, engine, position)
        except NotKnown as error:
            refused = error
    raise refused or NotKnown(f"there is no engine in whose stream {position} could be")


def _report(query: Query, engine: str, position: str) -> EventReport:
    found = query.events(engine, around=position, limit=1, kinds=ALL_KINDS)
    if not found or found[0].position != position:
        raise NotKnown(f"the stream of {engine} has no event {position} in the part that is kept")
    event = found[0]
    around = {one.position: one for one in (*query.events(engine, around=position, limit=AROUND), event)}
    pool = next(view for view in query.engines(at=position) if view.engine == engine)
    return EventReport(
        engine=engine,
        event=event,
        around=sorted(around.values(), key=_place),
        pool=pool,
        request=_request(query, event, engine),
        block=query.block(engine, event.blocks[0], at=position) if event.blocks else None,
    )


def _place(event: EventView) -> tuple[int, ...]:
    return tuple(map(int, event.position.split("/")))


def _request(query: Query, event: EventView, engine: str) -> RequestDetail | None:
    """Return the request that it is about, or None where the ledger no longer has one of that name."""
    if not event.request:
        return None
    try:
        return query.request(engine, event.request, at=event.position)
    except NotKnown:
        return None
