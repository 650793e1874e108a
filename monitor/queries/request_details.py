"""Requests, and one request's life."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from kvscope.monitor.analysis.event_history import request_history, request_names, scan_events
from kvscope.monitor.analysis.request_phases import phase_names, phases
from kvscope.monitor.analysis.wait_tree import Wait, wait_of, waited_s
from kvscope.monitor.errors import NotKnown
from kvscope.monitor.events.kinds import FIRST_FINISHED, Cause, Status, name_of
from kvscope.monitor.events.wire import Batch, Run
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.ledger.fragmentation import unused_tokens
from kvscope.monitor.queries.event_rows import history_entry
from kvscope.monitor.schema import ConditionView, PhaseView, RequestDetail, RequestView
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, timestamp

MOST_ENDED: Final = 100


def request_views(ledger: EngineLedger) -> list[RequestView]:
    """Return requests that live or hold blocks, the longest in their state first, and then the last MOST_ENDED that
    ended.
    """
    alive = sorted(ledger.state.requests.values(), key=lambda record: record.since_ns)
    return [_request_view(ledger, r) for r in alive] + [
        _request_view(ledger, r, ended=True) for r in list(ledger.ended)[: -MOST_ENDED - 1 : -1]
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
    return RequestDetail(
        engine=ledger.engine,
        request=_request_view(ledger, record, ended=record.number not in ledger.state.requests),
        blocks=list(record.blocks),
        waited_s=_waited_s(ledger, record),
        event_history=[history_entry(line) for line in history],
        event_history_complete=any(line.what in ("received", "arrived") for line in history),
        phases=_phase_views(ledger, record, about),
        conditions=_condition_views(ledger, record),
        waits=_wait_tree(ledger, record),
        unused_tokens=unused_tokens(ledger.state, ledger.description, record),
    )


def _request_view(ledger: EngineLedger, record: RequestState, ended: bool = False) -> RequestView:
    return RequestView(
        id=record.id,
        number=record.number,
        state=name_of(Status, record.status),
        reason=_request_reason(ledger, record),
        since=timestamp(ledger.wall(record.since_ns)),
        for_s=round(ledger.age_s(record.since_ns), 3),
        arrived=timestamp(ledger.wall(record.arrived_ns)),
        blocks=len(record.blocks),
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


def _wait_tree(ledger: EngineLedger, record: RequestState) -> Wait | None:
    wait = wait_of(ledger, record)
    return wait if wait.waits_for or record.is_waiting else None


def _condition_views(ledger: EngineLedger, record: RequestState) -> list[ConditionView]:
    """Return the conditions of a request, met and unmet."""
    usable = ledger.state.total - ledger.state.reserved
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
