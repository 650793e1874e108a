"""Fold the events of requests: arrival, queueing, admission, preemption, waits and the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice, takewhile
from typing import Final

from ..contract.kinds import CAUSE_OF, Cause, Kind, Status
from ..contract.trace_context import TraceContext
from .engine_state import EngineState
from .holders import end_if_over
from .prefix_reuse import CachedPrompt
from .records import UNKNOWN_POSITION, UNKNOWN_TOKENS, ComputedPrompt, Preemption, RequestState

FETCH_SLACK_NS: Final = 2_000_000_000
"""Another thread may report the end of a fetch an interval or two before the engine's own thread reports its start."""

RequestHandler = Callable[[EngineState, RequestState, list[int]], None]


def move_request(state: EngineState, record: RequestState, status: int, cause: int) -> None:
    """Put a request in a status for a cause, from now on."""
    record.not_queued_ns = 0  # it is in a queue: it was put there, or a pass found it there
    if record.status == status and record.cause == cause:
        return
    if record.is_waiting:
        waited = record.waited_ns
        waited[record.cause] = waited.get(record.cause, 0) + state.now_ns - record.since_ns
    if record.status != status:
        record.stalled_ns = 0
    record.status, record.cause, record.since_ns = status, cause, state.now_ns
    record.since_at = state.places.moved = state.position


# ---------------------------------------------------------------- arrival


def fold_received(state: EngineState, number: int, args: list[int], texts: Mapping[int, str]) -> None:
    """Add a request that the front end received."""
    record = _arriving(state, number, texts)
    record.status, record.cause, record.since_ns = Status.RECEIVED, Cause.NONE, args[0]
    record.received_ns, record.prompt_tokens = args[:2]


def fold_arrived(state: EngineState, number: int, args: list[int], texts: Mapping[int, str]) -> None:
    """Add a request that reached the scheduler."""
    record = _arriving(state, number, texts)
    state.now_ns = args[0]
    state.totals.arrived += 1
    state.places.moved = state.position
    record.arrived_ns, record.prompt_tokens, record.max_tokens, record.priority = args[:4]
    record.blocks_to_admit, record.blocks_to_finish = args[4:6]
    record.status, record.cause, record.since_ns = Status.WAITING, Cause.NEW, args[0]


def _arriving(state: EngineState, number: int, texts: Mapping[int, str]) -> RequestState:
    record = state.requests.get(number)
    if record is None:
        record = RequestState(number, texts.get(number, f"#{number}"), blocks=[], waited_ns={})
        state.requests[number] = record
    record.arrived_at = record.since_at = state.position
    return record


# ---------------------------------------------------------------- reports by other threads


def fold_client_gone(state: EngineState, number: int, args: list[int], _texts: Mapping[int, str]) -> None:
    """Record that the client closed its connection."""
    state.totals.client_gone += 1
    if (record := state.requests.get(number)) is not None:
        record.client_gone_ns = args[0]


def fold_traced(state: EngineState, number: int, args: list[int], _texts: Mapping[int, str]) -> None:
    """Keep the caller's trace context."""
    if (record := state.requests.get(number)) is not None:
        record.trace = TraceContext(*args[:4])


def fold_completion_delivered(state: EngineState, number: int, args: list[int], _texts: Mapping[int, str]) -> None:
    """Record that the connector reported the end of a fetch, or that it keeps the request's blocks no longer."""
    record = state.requests.get(number)
    if record is None:
        return
    if record.is_finished:
        if not record.fetching_ns:  # the end of a fetch counts once the engine has taken it in
            state.undefer(number, state.sending_blocks(number))
    else:
        record.fetch_ended_ns = args[0] if args else state.now_ns  # older engines report no time
        record.fetch_ended_at = state.position


def fold_stalled(state: EngineState, number: int, args: list[int], _texts: Mapping[int, str]) -> None:
    """Keep the watchdog's report if the status agrees: the watchdog runs in another thread and may be late."""
    record = state.requests.get(number)
    at_ns, status, since_step, cause = args[:4]
    if record is not None and record.status == status and not record.is_finished:
        record.stalled_ns, record.stalled_since_step, record.stalled_cause = at_ns, since_step, cause
        record.stalled_at = state.position


def fold_not_queued(state: EngineState, number: int, args: list[int], _texts: Mapping[int, str]) -> None:
    """Record that the request is in none of the engine's queues."""
    record = state.requests.get(number)
    if record is not None and not record.is_finished:
        record.not_queued_ns, record.not_queued_at = args[0], state.position


# ---------------------------------------------------------------- the scheduler's decisions


def fold_looked_up(state: EngineState, group: int, record: RequestState, args: list[int]) -> None:
    """Fold a prefix-cache lookup. Each KV group narrows the hit of the group before: the last one's hit counts."""
    tokens, hit_tokens = args[:2]
    state.places.looked_up = state.position
    if group == 0:
        state.totals.looked_up_tokens += tokens
        record.looked_up_tokens, record.hit_tokens = tokens, 0
        record.looked_up_at = state.position
        # Some engines cache the first chunk's blocks, and report it, before they report lookup and admission.
        record.cached_until_then = state.prompt_blocks_cached - record.cached_blocks
    state.totals.hit_tokens += hit_tokens - record.hit_tokens
    record.hit_tokens = hit_tokens


def _fold_queued(state: EngineState, record: RequestState, args: list[int]) -> None:
    status = Status.PREEMPTED if record.status == Status.PREEMPTED else Status.WAITING
    move_request(state, record, status, args[0])


def _fold_allocation_failed(state: EngineState, record: RequestState, args: list[int]) -> None:
    state.totals.allocation_failures += 1
    record.blocks_needed, record.blocks_free_then = args[:2]
    record.refused_at = state.position


def _fold_not_scheduled(state: EngineState, record: RequestState, args: list[int]) -> None:
    move_request(state, record, record.status, args[0])
    record.times_passed_over, record.passed_over_at = args[1], state.position


def _fold_admitted(state: EngineState, record: RequestState, args: list[int]) -> None:
    move_request(state, record, Status.RUNNING, Cause.NONE)
    if state.lost_tokens:
        state.news.recomputed += max(state.lost_tokens.pop(record.number, 0) - args[0], 0)
    if not record.admitted_ns:
        record.admitted_ns, record.admitted_step = state.now_ns, state.totals.steps
    record.fetch_ended_ns = 0
    record.progressed_ns = state.now_ns
    record.computed_tokens = record.admitted_tokens = args[0]
    record.admitted_outputs = record.output_tokens
    record.times_passed_over = record.blocks_needed = record.blocks_free_then = 0


def _fold_first_token(state: EngineState, record: RequestState, _args: list[int]) -> None:
    record.first_token_ns = state.now_ns
    if not record.looked_up_tokens or record.preemptions:
        return  # where steps overlap, the token may come after a preemption, before which no block was cached
    # Blocks that did not enter the cache were there already, except those that equal prompts cached meanwhile.
    full, hit = record.prompt_tokens // state.block_size, record.hit_tokens // state.block_size
    if record.fetching_at > record.looked_up_at:  # the hit includes what the fetch will bring
        hit = min(hit, record.reused_blocks)
    others = state.prompt_blocks_cached - record.cached_until_then - record.cached_blocks
    lacked = max(max(record.cached_by_group.values(), default=0) - record.cached_blocks, 0)
    again = max(full - hit - record.cached_blocks - others - lacked, 0)
    kept = _count_kept(state, record, full) if state.cached_prompts is not None else 0
    ends_full = record.prompt_tokens % state.block_size == 0
    not_entered = takewhile(lambda block: not state.hashes[block], islice(record.blocks, hit, full))
    could_hit = min(again, sum(1 for _ in not_entered)) if again else 0
    state.news.prompts.append(
        ComputedPrompt(record.id, state.now_ns, full, hit, again, state.position, kept, ends_full, could_hit, lacked)
    )


def _count_kept(state: EngineState, record: RequestState, full: int) -> int:
    """Count the blocks of a prompt, just computed, that other blocks held, and remember the prompt.

    What a fetch brings is looked up before it begins, and cached by the time that the request is admitted.
    """
    prompts, blocks = state.cached_prompts, record.blocks[:full]
    if prompts is None or record.fetching_at != UNKNOWN_POSITION:
        return 0
    supplied = max(record.hit_tokens, record.admitted_tokens) // state.block_size
    kept = prompts.count_kept(blocks, supplied, record.admitted_ns, state.hashes, state.born)
    prompts.add(CachedPrompt(blocks, state.now_ns), state.hashes, state.born, state.total)
    return kept


def _fold_preempted(state: EngineState, record: RequestState, args: list[int]) -> None:
    reason, beneficiary, _, tokens_lost = args[:4]
    _add_preemption(state, record, args)
    move_request(state, record, Status.PREEMPTED, Cause.PREEMPTED)
    record.preemptions += 1
    record.preempted_at = state.position
    if beneficiary == record.number and state.used <= len(record.blocks):
        _count_self_preemption(state, record)
    record.tokens_lost += tokens_lost
    if not state.damaged:
        state.lost_tokens[record.number] = tokens_lost
    record.computed_tokens = record.cached_blocks = record.reached_tokens = 0
    record.cached_by_group = {}
    totals = state.totals
    totals.preemptions[reason] = totals.preemptions.get(reason, 0) + 1
    totals.tokens_lost += tokens_lost


def _add_preemption(state: EngineState, record: RequestState, args: list[int]) -> None:
    reason, beneficiary, blocks, tokens_lost = args[:4]
    last, taker = state.last_preemption, state.requests.get(beneficiary)
    if last is not None and last.at_ns == state.now_ns:
        ran = last.running, last.running_blocks, last.running_tokens
    else:
        running = [other for other in state.requests.values() if other.is_running]
        tokens = sum(max(one.computed_tokens, one.prompt_tokens + one.output_tokens) for one in running)
        ran = len(running), sum(len(one.blocks) for one in running), tokens
    outputs = record.output_tokens - record.admitted_outputs
    released = sum(state.totals.released.values())
    computes = record.is_running and record.admitted_tokens != UNKNOWN_TOKENS
    last = Preemption(
        record.id,
        state.now_ns,
        reason,
        blocks,
        tokens_lost,
        outputs,
        ran[0],
        state.free,
        released,
        state.position,
        max(tokens_lost - record.admitted_tokens, 0) if computes else 0,
        *ran[1:],
        0 if taker in (None, record) else state.blocks_of_tokens(taker) - len(taker.blocks),
    )
    state.last_preemption = last
    state.news.preempted.append(last)


def _count_self_preemption(state: EngineState, record: RequestState) -> None:
    if record.output_tokens != record.self_preempted_outputs:
        record.self_preemptions, record.self_preempted_ns = 0, state.now_ns
        record.self_preempted_outputs = record.output_tokens
    record.self_preemptions += 1


def _fold_waiting_on(state: EngineState, record: RequestState, args: list[int]) -> None:
    move_request(state, record, args[0], CAUSE_OF.get(args[0], Cause.NONE))
    if args[0] == Status.WAITING_FOR_REMOTE_KVS:
        record.fetching_ns, record.fetching_at = state.now_ns, state.position
        if record.fetch_ended_ns < state.now_ns - FETCH_SLACK_NS:
            record.fetch_ended_ns = 0  # of an earlier fetch


def _fold_ready(state: EngineState, record: RequestState, _args: list[int]) -> None:
    _note_wait(state, record)
    move_request(state, record, Status.WAITING, Cause.NEW)
    record.fetching_ns = record.fetch_ended_ns = 0
    if not record.ready_ns:
        record.ready_ns, record.ready_at = state.now_ns, state.position


def _fold_remote_load(state: EngineState, record: RequestState, _args: list[int]) -> None:
    _note_wait(state, record)
    record.fetching_ns = record.fetch_ended_ns = 0
    if not record.is_finished:
        record.ready_ns, record.ready_at = state.now_ns, state.position


def _note_wait(state: EngineState, record: RequestState) -> None:
    """Keep how long a fetch, or a grammar, that is there now took."""
    waits = state.outside_waits
    if waits is None:
        return
    if record.fetching_ns:
        waits.fetches.note(record.fetching_ns, state.now_ns, len(record.blocks))
    elif record.status == Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        waits.grammars.note(record.arrived_ns, state.now_ns)


def _fold_finished(state: EngineState, record: RequestState, args: list[int]) -> None:
    move_request(state, record, args[0], Cause.NONE)
    state.lost_tokens.pop(record.number, None)
    record.finished_ns, record.ended_step = state.now_ns, state.totals.steps
    record.ended_blocks = len(record.blocks)
    record.peak_blocks = max(record.peak_blocks, record.ended_blocks)
    state.news.finished.append(record)
    state.totals.finished[args[0]] = state.totals.finished.get(args[0], 0) + 1
    end_if_over(state, record)


REQUEST_HANDLERS: Final[dict[int, RequestHandler]] = {
    int(Kind.QUEUED): _fold_queued,
    int(Kind.ALLOCATION_FAILED): _fold_allocation_failed,
    int(Kind.NOT_SCHEDULED): _fold_not_scheduled,
    int(Kind.ADMITTED): _fold_admitted,
    int(Kind.FIRST_TOKEN): _fold_first_token,
    int(Kind.PREEMPTED): _fold_preempted,
    int(Kind.WAITING_ON): _fold_waiting_on,
    int(Kind.READY): _fold_ready,
    int(Kind.REMOTE_LOAD): _fold_remote_load,
    int(Kind.FINISHED): _fold_finished,
}
"""Handlers of the scheduler's decisions about one request."""
_REPORTS_READY: Final = frozenset((int(Kind.READY), int(Kind.REMOTE_LOAD)))
_NOT_SCHEDULED: Final = int(Kind.NOT_SCHEDULED)
_REMOTE_KVS: Final = int(Status.WAITING_FOR_REMOTE_KVS)


def keeps_ready(record: RequestState, kind: int) -> bool:
    """Return whether a ready request still awaits the scheduler's inspection after a decision of this kind.

    If it is passed over with the status of its fetch, the pass ended before it reached the request or left it alone.
    """
    return kind in _REPORTS_READY or (kind == _NOT_SCHEDULED and record.status == _REMOTE_KVS)
