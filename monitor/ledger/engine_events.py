"""Fold the events of the engine as a whole: its start, memory and heartbeats, its steps and its offload tiers."""

from __future__ import annotations

from collections.abc import Mapping

from ..base import limits
from ..contract.kinds import Cause, TierOp
from ..contract.wire import STACK_TEXT
from .engine_state import EngineState
from .records import EngineStack, Heartbeat, RequestState, StepInFlight, TierState
from .request_events import move_request


def fold_clock(state: EngineState, _ids: list[int], args: list[int]) -> None:
    """Advance the engine's monotonic clock."""
    state.now_ns = args[0]


def fold_launched(state: EngineState, ids: list[int], args: list[int]) -> None:
    """Add a step in flight: its requests are the ids, its tokens the arguments after time and number."""
    state.now_ns = state.launched_ns = args[0]
    step, at = args[1], state.position
    state.places.launched = at
    state.in_flight[step] = StepInFlight(step, args[0], len(ids), sum(args[2:]), at)
    if state.step_times is not None:
        state.step_times.launch(step, args[0], ids, args[2:], state.requests)


def fold_completed(state: EngineState, _ids: list[int], args: list[int]) -> None:
    """Complete a step, and compare the engine's counts of the pool with the state."""
    at_ns, step, duration_ns, limit, *counts = args[:7]
    state.now_ns = at_ns
    state.last_step = step
    state.places.completed = state.position
    state.in_flight.pop(step, None)
    if state.in_flight:  # steps end in order: the end of an earlier one is among the lost events
        state.in_flight = {later: launched for later, launched in state.in_flight.items() if later > step}
    if state.early:
        state.early = {block: fence for block, fence in state.early.items() if fence != step}
    if state.fences:
        _pass_fence(state, step)
    if state.step_times is not None:
        state.step_times.complete(step, at_ns)
    totals = state.totals
    totals.steps += 1
    totals.step_ns += duration_ns
    state.longest_step_ns = max(state.longest_step_ns, duration_ns)
    totals.limits[limit] = totals.limits.get(limit, 0) + 1
    free, cached_idle, used = (*counts, -1, -1, -1)[:3]
    if not state.counts_match(free, cached_idle, used):
        state.check(free, cached_idle, used)


def _pass_fence(state: EngineState, step: int) -> None:
    for number in state.fences.pop(step, ()):
        deferral = state.deferrals.get(number)
        if deferral is not None and deferral.fence == step:
            deferral.fence_passed_ns, deferral.fence_passed_at = state.now_ns, state.position


def fold_progressed(state: EngineState, ids: list[int], args: list[int]) -> None:
    """Advance the requests of a step: args are their computed tokens, then their output tokens."""
    now, half, requests = state.now_ns, len(ids), state.requests
    state.places.progressed = state.position
    more_computed = more_outputs = 0
    for number, computed, outputs in zip(ids, args[:half], args[half:], strict=True):
        record = requests.get(number)
        if record is None:
            continue  # aborted while its step ran
        if computed == record.computed_tokens and outputs == record.output_tokens:
            continue  # it was in the step, and got nothing from it
        if computed > record.computed_tokens:
            more_computed += computed - record.computed_tokens
            if 0 < record.reached_tokens < computed:
                record.reached_tokens = 0
        elif computed < record.computed_tokens and not record.reached_tokens:
            _note_sent_back(state, record, computed)
        if outputs != record.output_tokens:
            if outputs > record.output_tokens:
                more_outputs += outputs - record.output_tokens
            record.output_tokens = outputs
            record.not_queued_ns = 0
        record.computed_tokens = computed
        record.progressed_ns = now
        if record.stalled_ns:
            record.stalled_ns = 0
        if record.cause and record.is_running:  # was passed over for a while, and no longer is
            move_request(state, record, record.status, Cause.NONE)
    if more_computed:
        state.computed_ns = now
    state.totals.computed_tokens += more_computed
    state.totals.output_tokens += more_outputs


def _note_sent_back(state: EngineState, record: RequestState, computed: int) -> None:
    """Note how far a request had come that computes again what it needs. Tokens beyond its own were drafts: the model
    rejected them, and they are no work that was lost.
    """
    reached = min(record.computed_tokens, record.prompt_tokens + record.output_tokens - 1)
    if computed < reached:
        record.reached_tokens, record.reached_ns, record.reached_at = reached, record.progressed_ns, state.position


def fold_heartbeat(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Keep the last heartbeat."""
    state.heartbeat, state.places.heartbeat = Heartbeat(*args[:10]), state.position


def fold_started(state: EngineState, args: list[int], texts: Mapping[int, str]) -> None:
    """Create the pool. Raises ValueError for a second start in one epoch and for an impossible pool."""
    at_ns, total, reserved, block_size = args[:4]
    if state.total:
        raise ValueError("an engine starts once an epoch")
    if not 0 <= reserved <= total <= limits.POOL_BLOCKS or not 1 <= block_size <= limits.BLOCK_TOKENS:
        raise ValueError(f"a pool of {total} blocks of {block_size} tokens, {reserved} of them reserved")
    state.description = texts.get(-1, "")
    state.now_ns = state.started_ns = at_ns
    state.places.started = state.places.pool = state.position
    state.total, state.reserved, state.block_size = total, reserved, block_size
    state.set_columns([0] * total, [-1] * total, [0] * total, [at_ns] * total, [0] * total)


def fold_stopped(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Record when the engine stopped."""
    state.now_ns = state.stopped_ns = args[0]


def fold_engine_mode(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Record that the engine was paused, put to sleep or woken."""
    state.now_ns = state.mode_since_ns = args[0]
    state.mode, state.places.mode = args[1], state.position


def fold_stack(state: EngineState, args: list[int], texts: Mapping[int, str]) -> None:
    """Keep the stack of the engine's thread in a late step."""
    state.stack = EngineStack(args[0], args[1], args[2], args[3], texts.get(STACK_TEXT, ""), state.position)


def fold_memory(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Keep the memory breakdown (see SCHEMA[Kind.MEMORY])."""
    state.memory, state.places.memory = args, state.position


def fold_tier(state: EngineState, args: list[int], _texts: Mapping[int, str]) -> None:
    """Fold one operation on a tier: operation, tier, blocks used, capacity, then the keys it touched."""
    operation, number, used, capacity, *keys = args
    tier = state.tiers.setdefault(number, TierState(operations={}))
    tier.used, tier.capacity, tier.at = used, capacity, state.position
    tier.operations[operation] = tier.operations.get(operation, 0) + len(keys)
    if operation == TierOp.PINNED:
        _pin(state, tier.pins, keys)
    elif operation == TierOp.UNPINNED:
        _unpin(state, tier.pins, keys)
        tier.unpinned_ns = state.now_ns


def _pin(state: EngineState, pins: dict[int, tuple[int, ...]], keys: list[int]) -> None:
    for key in keys:
        count, *since = pins.get(key, (0, state.now_ns, state.position))
        pins[key] = count + 1, *since


def _unpin(state: EngineState, pins: dict[int, tuple[int, ...]], keys: list[int]) -> None:
    for key in keys:
        count, *_ = pins.pop(key, (0,))
        if count > 1:  # which of its pins was the oldest is not known: those that remain count from now on
            pins[key] = count - 1, state.now_ns, state.position
