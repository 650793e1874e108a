"""One request with its phases, and the requests whose id has a part: in the ledgers, then in the history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from ..base.errors import NotKnown
from ..base.text import counted, duration, timestamp
from ..contract.kinds import FIRST_FINISHED, Cause, Status, name_of
from ..contract.wire import Batch, Run
from ..history.history import History
from ..ledger.engine_ledger import EngineLedger, Position
from ..ledger.event_history import phase_names, phases, request_history, request_names, scan_events
from ..ledger.harms import contradicted_since_ns, first_token_wait
from ..ledger.ledger_records import unused_tokens
from ..ledger.pool_account import NO_BLOCKS, RequestBlocks, blocks_of, request_blocks
from ..ledger.records import RequestState
from ..ledger.wait_graph import wait_of, waited_s
from .event_list import history_entry
from .schema import ConditionView, FoundRequest, PhaseView, RequestDetail, RequestSearch, RequestView

MOST_ENDED: Final = 100


def request_views(ledger: EngineLedger) -> list[RequestView]:
    """Return requests that live or hold blocks, the longest in their state first, and then the last MOST_ENDED that
    ended.
    """
    alive = sorted(ledger.state.requests.values(), key=lambda record: record.since_ns)
    held = request_blocks(ledger.state)
    return [_request_view(ledger, r, held[r.number]) for r in alive] + [
        _request_view(ledger, r, NO_BLOCKS, ended=True) for r in list(ledger.ended)[: -MOST_ENDED - 1 : -1]
    ]


def request_detail(ledger: EngineLedger, name: str, batches: Callable[[int], Iterable[Batch]]) -> RequestDetail:
    """Return one request by its id or `#number`. `batches` gives those packed from a time on (wall ns). Raises
    NotKnown.
    """
    record = ledger.request(name)
    if record is None:
        raise NotKnown(f"{ledger.engine} has no request {name!r}, and none with that id ended there recently")
    began_ns = ledger.wall(record.received_ns or record.arrived_ns)
    about = list(scan_events([b for b in batches(began_ns) if b.wall_ns >= began_ns], record.number))
    history = request_history(about, record.number, request_names(ledger))
    wait = wait_of(ledger, record)
    ended = record.number not in ledger.state.requests
    held = NO_BLOCKS if ended else request_blocks(ledger.state)[record.number]
    return RequestDetail(
        engine=ledger.engine,
        request=_request_view(ledger, record, held, ended=ended),
        blocks=[] if ended else blocks_of(ledger.state, record),
        waited_s=_waited_s(ledger, record),
        event_history=[history_entry(line) for line in history],
        event_history_complete=any(line.what in ("received", "arrived") for line in history),
        phases=_phase_views(ledger, record, about),
        conditions=_condition_views(ledger, record),
        waits=wait if wait.waits_for or record.is_waiting else None,
        unused_tokens=unused_tokens(ledger.state, ledger.description, record),
    )


def _request_view(
    ledger: EngineLedger, record: RequestState, held: RequestBlocks, *, ended: bool = False
) -> RequestView:
    return RequestView(
        id=record.id,
        number=record.number,
        state=name_of(Status, record.status),
        reason=_request_reason(ledger, record),
        since=timestamp(ledger.wall(record.since_ns)),
        for_s=round(ledger.age_s(record.since_ns), 3),
        arrived=timestamp(ledger.wall(record.arrived_ns)),
        blocks=held.total,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        computed_tokens=record.computed_tokens,
        output_tokens=record.output_tokens,
        hit_tokens=record.hit_tokens,
        preemptions=record.preemptions,
        tokens_lost=record.tokens_lost,
        blocks_needed=record.blocks_needed,
        deferred=record.number in ledger.state.deferrals,
        client_gone=bool(record.client_gone_ns),
        stalled=bool(record.stalled_ns),
        ended=ended,
        waited_s=_waited_s(ledger, record),
        shared_blocks=held.shared,
        counted_blocks=held.counted,
    )


def _waited_s(ledger: EngineLedger, record: RequestState) -> dict[str, float]:
    return {cause: round(seconds, 3) for cause, seconds in waited_s(ledger, record).items()}


def _phase_views(ledger: EngineLedger, record: RequestState, about: list[tuple[Position, int, Run]]) -> list[PhaseView]:
    views = []
    for phase in phases(about, record.number, ledger.now_ns):
        state, reason = phase_names(phase)
        views.append(
            PhaseView(
                state=state,
                reason=reason,
                since=timestamp(phase.since_ns),
                for_s=round(phase.seconds, 3),
                blocks=phase.blocks,
                computed_tokens=phase.computed_tokens,
                output_tokens=phase.output_tokens,
                phase_tokens=phase.computed,
                recomputed_tokens=phase.recomputed,
            )
        )
    if views:  # no event reports that it is behind another, or that its blocks are kept
        views[-1] = msgspec.structs.replace(views[-1], reason=_request_reason(ledger, record))
    return views


def _condition_views(ledger: EngineLedger, record: RequestState) -> list[ConditionView]:
    """Return the conditions of a request, met and unmet."""
    usable = ledger.state.usable
    fits = not record.blocks_to_finish or record.blocks_to_finish <= usable
    quiet = duration(ledger.age_s(record.progressed_ns)) if record.progressed_ns else ""
    conditions = [
        ("Admitted", bool(record.admitted_ns), record.admitted_ns, ""),
        ("FirstToken", bool(record.first_token_ns), record.first_token_ns, ""),
        ("Running", record.is_running, record.since_ns, f"last progress {quiet} ago" if quiet else ""),
        ("FitsThePool", fits, 0, f"{counted(record.blocks_to_finish, 'block')} to finish, of {usable:,}"),
        ("ClientThere", not record.client_gone_ns, record.client_gone_ns, ""),
        (
            "Stalled",
            bool(record.stalled_ns),
            record.stalled_ns,
            "by the engine's own watchdog" if record.stalled_ns else "",
        ),
        ("Finished", record.is_finished, record.finished_ns, ""),
    ]
    if (wait := first_token_wait(ledger, record)) is not None:
        waited = f"{duration(wait.waited_s)} for its first token; 95 % of {counted(wait.usual_of, 'earlier request')}"
        usual = f"{waited} usually waited {duration(wait.usual_p95_s)} or less"
        conditions.append(("UsualWait", wait.is_usual, record.arrived_ns, usual))
    if (since_ns := contradicted_since_ns(ledger, record)) is not None:
        conditions.append(("ReasonHolds", False, since_ns, "the pool and the queues contradict the engine's reason"))
    if record.is_finished:
        conditions.append(("BlocksFreed", not record.blocks, 0, _request_reason(ledger, record)))
    return [ConditionView(name, holds, timestamp(ledger.wall(at)), why) for name, holds, at, why in conditions]


def _request_reason(ledger: EngineLedger, record: RequestState) -> str:
    if record.status >= FIRST_FINISHED:
        if record.number in ledger.state.deferrals:
            return "FREE_DEFERRED"
        return "UNACCOUNTED" if record.blocks else ""
    cause = ledger.cause_of_wait(record)
    return "" if cause == Cause.NONE else cause.name


# -------------------------------------------------------------------- search


MAX_SEARCH_S: Final = 5.0
"""Longer than a reader of the page waits. The answer reports how far back it went."""
_ONE_MS_NS: Final = 1_000_000

Found = dict[tuple[str, int, int], FoundRequest]
"""By engine, epoch and number."""


def in_ledger(ledger: EngineLedger, part: str, from_ns: int, to_ns: int) -> Iterator[FoundRequest]:
    """Yield the requests of a window that live, hold blocks or ended recently. part: of the id, in lower case."""
    living = ledger.state.requests
    for record in (*living.values(), *reversed(ledger.ended)):
        seen_ns = ledger.wall(record.received_ns or record.arrived_ns)
        is_there = record.number in living or ledger.wall(record.since_ns) >= from_ns
        if part in record.id.lower() and seen_ns <= to_ns and is_there:
            yield FoundRequest(
                ledger.engine,
                record.id,
                record.number,
                ledger.epoch,
                name_of(Status, record.status),
                record.number not in living,
                timestamp(seen_ns),
            )


class HistorySearch:
    """A search in the history: `found` grows with each segment, the latest first, until `limit` or MAX_SEARCH_S."""

    def __init__(self, history: History, part: str, from_ns: int, to_ns: int, found: Found, limit: int) -> None:
        self.found = found
        self.searched_ns = to_ns
        self.is_complete = True
        self._history = history
        self._part = part
        self._from_ns = from_ns
        self._to_ns = to_ns
        self._limit = limit
        self._until_s = time.monotonic() + MAX_SEARCH_S

    def search(self, engine: str) -> None:
        """Search the segments of an engine."""
        for reader in self._history.readers(engine, self._from_ns, self._to_ns):
            if len(self.found) >= self._limit or time.monotonic() > self._until_s:
                self.is_complete = False
                return
            for wall_ns, epoch, texts in reader.texts():
                self._enter(engine, wall_ns, epoch, texts)
                self.searched_ns = min(self.searched_ns, wall_ns)

    def _enter(self, engine: str, wall_ns: int, epoch: int, texts: dict[int, str]) -> None:
        for number, text in texts.items():
            if number < 0 or self._part not in text.lower() or not self._from_ns <= wall_ns <= self._to_ns:
                continue
            place = (engine, epoch, number)
            before = self.found.get(place)
            at = timestamp(wall_ns + _ONE_MS_NS) or ""
            if before is None or (before.at and at < before.at):
                self.found[place] = FoundRequest(engine, text, number, epoch, "", True, timestamp(wall_ns), at)


def ordered(found: Found, limit: int, searched_ns: int, is_complete: bool) -> RequestSearch:
    """Return the answer: those that live first, then the latest."""
    requests = sorted(found.values(), key=lambda one: (not one.ended, one.first_seen or ""), reverse=True)
    return RequestSearch(requests[:limit], timestamp(searched_ns), is_complete and len(requests) <= limit)
