"""The fold: `apply_events` takes an engine's state one batch further. Deterministic, no I/O, no clock.

The engine's drain thread folds its own events into the shadow from which it cuts keyframes, and a reader folds the
same events into its ledger, so a loaded keyframe equals the state that the events would have given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..base import limits
from ..contract.kinds import Kind
from ..contract.wire import NotAFrame, fives
from . import engine_events, request_events
from .audit_events import fold_audit
from .block_events import BLOCK_HANDLERS, DROPPING_KINDS
from .engine_events import fold_tier
from .engine_state import EVENT_BITS, EngineState
from .holders import drop_from_tables, request_record
from .records import AnomalyKind
from .request_events import REQUEST_HANDLERS, keeps_ready

StepHandler = Callable[[EngineState, list[int], list[int]], None]
"""Folds a kind that occurs once or more a step: state, ids, arguments."""
EngineHandler = Callable[[EngineState, list[int], Mapping[int, str]], None]
"""Folds a kind that concerns the whole engine: state, arguments, texts."""
NumberHandler = Callable[[EngineState, int, list[int], Mapping[int, str]], None]
"""Folds a kind that names a request, known or not: state, its number, arguments, texts."""

# Plain numbers as keys: an IntEnum's member hashes and compares several times as slowly, and this runs for every event.
STEP_HANDLERS: Final[dict[int, StepHandler]] = {
    int(Kind.CLOCK): engine_events.fold_clock,
    int(Kind.PROGRESSED): engine_events.fold_progressed,
    int(Kind.STEP_LAUNCHED): engine_events.fold_launched,
    int(Kind.STEP_COMPLETED): engine_events.fold_completed,
}
ENGINE_HANDLERS: Final[dict[int, EngineHandler]] = {
    int(Kind.HEARTBEAT): engine_events.fold_heartbeat,
    int(Kind.STARTED): engine_events.fold_started,
    int(Kind.STOPPED): engine_events.fold_stopped,
    int(Kind.ENGINE_MODE): engine_events.fold_engine_mode,
    int(Kind.STACK): engine_events.fold_stack,
    int(Kind.MEMORY): engine_events.fold_memory,
    int(Kind.TIER): fold_tier,
}
NUMBER_HANDLERS: Final[dict[int, NumberHandler]] = {
    int(Kind.RECEIVED): request_events.fold_received,
    int(Kind.ARRIVED): request_events.fold_arrived,
    int(Kind.CLIENT_GONE): request_events.fold_client_gone,
    int(Kind.TRACED): request_events.fold_traced,
    int(Kind.COMPLETION_DELIVERED): request_events.fold_completion_delivered,
    int(Kind.STALLED): request_events.fold_stalled,
    int(Kind.NOT_QUEUED): request_events.fold_not_queued,
}
_AUDIT_KINDS: Final = frozenset(
    int(kind) for kind in (Kind.AUDIT_BEGIN, Kind.AUDIT_BLOCKS, Kind.AUDIT_REQUEST, Kind.AUDIT_END)
)
_NO_ARGS: Final[list[int]] = []
_LOOKED_UP: Final = int(Kind.LOOKED_UP)
_REQUEST_KINDS: Final = frozenset((*REQUEST_HANDLERS, *NUMBER_HANDLERS, _LOOKED_UP))


def apply_events(
    state: EngineState,
    runs: list[int],
    args: list[int],
    ids: list[int],
    texts: Mapping[int, str],
    sequence: int = -1,
) -> None:
    """Fold events into `state`, in order.

    The lists are a batch's columns, or a log's lists before they are packed. `sequence` is the batch's number. Events
    laid out as SCHEMA describes never raise. Others may (IndexError, ValueError, OverflowError).
    """
    state.sequence = sequence
    samples = state.samples
    pool = state.used, state.cached_idle
    block_handler_of = BLOCK_HANDLERS.get
    first, end = state.reserved, state.total
    drops = state.pending_drops
    if drops:  # of a batch that could not be folded to its end
        drop_from_tables(state)
    a = i = 0
    index = -1
    for kind, group, number, n_args, n_ids in fives(runs):
        index += 1
        state.event_index = index
        a_end, i_end = a + n_args, i + n_ids
        if drops and kind not in DROPPING_KINDS:
            drop_from_tables(state)
        block_handler = block_handler_of(kind)
        if block_handler is not None:
            if n_ids == 1:  # the usual decode case, worth a shorter way
                blocks = [ids[i]]
                in_pool = first <= ids[i] < end
            else:
                blocks = ids[i:i_end]
                ordered = sorted(blocks)  # faster than min and max
                in_pool = not blocks or first <= ordered[0] <= ordered[-1] < end
            if in_pool:
                block_handler(state, group, number, blocks, args[a:a_end] if n_args else _NO_ARGS, samples)
            else:
                state.anomaly(AnomalyKind.OUT_OF_RANGE, max(blocks), number, f"the pool has {state.total}")
        elif (step_handler := STEP_HANDLERS.get(kind)) is not None:
            step_handler(state, ids[i:i_end], args[a:a_end])
        else:
            _apply_rare(state, kind, group, number, args[a:a_end], ids[i:i_end], texts)
            first, end = state.reserved, state.total
        a, i = a_end, i_end
    if drops:
        drop_from_tables(state)
    state.event_index = max(index, 0)  # what the whole batch shows is found at its end
    if pool != (state.used, state.cached_idle):
        state.places.pool = max(state.places.pool, sequence << EVENT_BITS | _last_block_event(runs))


def require_few_requests(state: EngineState, runs: Sequence[int]) -> None:
    """Raise NotAFrame for a batch that could leave more than limits.ENGINE_LEDGER_REQUESTS requests."""
    kept = len(state.requests) + len(state.deferrals)
    if kept + len(runs) // 5 <= limits.ENGINE_LEDGER_REQUESTS:
        return
    new = {number for number in runs[2::5] if number >= 0}.difference(state.requests, state.deferrals)
    if kept + len(new) > limits.ENGINE_LEDGER_REQUESTS:
        raise NotAFrame(
            f"it names {len(new):,} further requests beside {kept:,}, and a ledger has"
            f" {limits.ENGINE_LEDGER_REQUESTS:,} at most"
        )


def _apply_rare(
    state: EngineState, kind: int, group: int, number: int, args: list[int], ids: list[int], texts: Mapping[int, str]
) -> None:
    """Fold every kind that is neither about blocks nor once a step. Unknown kinds are skipped."""
    if number < 0 and kind in _REQUEST_KINDS:
        state.anomaly(AnomalyKind.NO_REQUEST, -1, number, Kind(kind).name)
    elif kind in REQUEST_HANDLERS:
        record = request_record(state, number)
        if record.ready_ns and not keeps_ready(record, kind):
            record.ready_ns = 0
        REQUEST_HANDLERS[kind](state, record, args)
    elif kind == _LOOKED_UP:
        request_events.fold_looked_up(state, group, request_record(state, number), args)
    elif kind in NUMBER_HANDLERS:
        NUMBER_HANDLERS[kind](state, number, args, texts)
    elif kind in ENGINE_HANDLERS:
        ENGINE_HANDLERS[kind](state, args, texts)
    elif kind in _AUDIT_KINDS:
        fold_audit(state, kind, group, number, args, ids, texts)


def _last_block_event(runs: list[int]) -> int:
    """Return the index of the last event about blocks."""
    index = len(runs) // 5 - 1
    while index > 0 and runs[5 * index] not in BLOCK_HANDLERS:
        index -= 1
    return index
