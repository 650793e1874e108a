"""Parts of a replay: a ledger to continue from, the first events of a batch, and time that passes without events."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from msgspec.structs import replace

from ..contract.kinds import Kind
from ..contract.wire import NO_REQUEST, Batch, Run, batch_of, column, fives
from .cached_prefixes import CachedPrefixes
from .durations import StepTimes
from .engine_ledger import EngineLedger
from .event_history import CARRIES_TIME
from .tally import Tally


def fork(ledger: EngineLedger) -> EngineLedger:
    """Return a copy of the ledger, as of its last batch, that continues independently. A tenth of the time that a
    keyframe takes. Without batches and points, which are kept elsewhere, and without what is only counted to be drawn
    and judged as it happens.
    """
    state = ledger.state
    requests = {
        number: replace(record, blocks=record.blocks.copy(), waited_ns=record.waited_ns.copy())
        for number, record in state.requests.items()
    }
    # By the id of what is there, what stands for it; all else, which is little, is copied in depth.
    memo: dict[int, Any] = {id(record): requests[number] for number, record in state.requests.items()}
    memo |= {id(column): column.copy() for column in (state.refs, state.owner, state.hashes, state.since, state.born)}
    memo |= {id(state.requests): requests, id(state.in_flight): state.in_flight.copy()}
    memo[id(state.more)] = {block: owners.copy() for block, owners in state.more.items()}
    memo |= {
        id(state.residency_samples): None,
        id(state.evictions): None,
        id(state.cached_prompts): None,
        id(ledger.step_times): StepTimes(),
        id(ledger.tally): Tally(),
    }
    memo |= {id(frozen): frozen for frozen in (ledger.description, state.heartbeat)}
    for found in (ledger.ended, ledger.losses, ledger.anomalies, ledger.lapses, ledger.preempted, ledger.prompts):
        memo[id(found)] = found.copy()
    memo[id(ledger.just_finished)] = deque(maxlen=ledger.just_finished.maxlen)
    memo |= {id(ledger.recent): deque(), id(ledger.points): deque(maxlen=ledger.points.maxlen)}
    memo |= {id(ledger.samples): deque(maxlen=ledger.samples.maxlen), id(ledger.facts): {}}
    memo |= {id(ledger.prefixes): CachedPrefixes(), id(ledger.siblings): []}
    other = copy.deepcopy(ledger, memo)
    other.counting = False
    other.now_ns = other.last_received_ns
    return other


def still_ledger(ledger: EngineLedger) -> EngineLedger:
    """Return the ledger at its current position, with its batches, points and samples, so that several queries refer to
    one position. It is not to be applied to.
    """
    still = fork(ledger)
    still.now_ns, still.counting = ledger.now_ns, ledger.counting
    still.recent, still.points = ledger.recent.copy(), ledger.points.copy()
    still.samples, still.past_samples = ledger.samples.copy(), ledger.past_samples.copy()
    still.facts = ledger.facts.copy()
    # These are not shown by position: they describe the engine's pace and its KV events, and are not copied.
    still.step_times, still.tally, still.prefixes = ledger.step_times, ledger.tally, ledger.prefixes
    return still


def first_events(batch: Batch, count: int) -> Batch:
    """Return the batch as if it had ended after its first `count` events: without the counts of its end, and with the
    time of the last of these events.
    """
    runs, args, ids = batch.columns()
    if count >= len(runs) // 5:
        return batch
    runs = runs[: 5 * count]
    mono_ns = a = 0
    for kind, _, _, n_args, _ in fives(runs):
        if kind in CARRIES_TIME and n_args:
            mono_ns = args[a]
        a += n_args
    wall_ns = batch.wall_ns - batch.mono_ns + mono_ns if mono_ns else batch.wall_ns
    return replace(
        batch,
        wall_ns=wall_ns,
        mono_ns=mono_ns or batch.mono_ns,
        **dict.fromkeys(("free", "cached_idle", "used", "total"), -1),
        runs=column("i", runs),
        args=column("q", args[:a]),
        ids=column("i", ids[: sum(runs[4::5])]),
    )


def observed(engine: str, epoch: int, wall_ns: int) -> Batch:
    """Return a batch that only advances the time, as a source reports it when nothing else arrives."""
    return batch_of(engine, epoch, [Run(Kind.OBSERVED, 0, NO_REQUEST, [wall_ns], [])])
