"""What the head of the waiting queue lacks, and what lacks it so that others wait too.

stuck.never-fits     more blocks than the pool has: nothing can bring them
stuck.parked-loads   blocks that others hold who wait behind it, while nothing runs: nobody gives any back
stuck.head-of-line   blocks that others hold who run; meanwhile there is room for those behind it

Needs arrivals or failed allocations of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.advice import room_for
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.stuck.waiting_requests import Living, is_outside, verdict_of, watchdog, what_is_missing
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import counted, duration, listed, percent

NEVER_FITS = "stuck.never-fits"
PARKED_LOADS = "stuck.parked-loads"
HEAD_OF_LINE = "stuck.head-of-line"
NEVER_FITS_WONT_HELP: Final = (
    "Waiting, or lowering the load: even an empty pool is too small.",
    "Restarting: the same request wedges it again.",
)


def judge(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    """Who waits for blocks that do not come."""
    yield from _never_fits(ledger, settings, living)
    head = ledger.head()
    if head is None or head.cause != Cause.KV_BLOCKS or head.blocks_needed <= head.blocks_free_then:
        return
    if head.blocks_needed > ledger.state.total - ledger.state.reserved:
        return
    if living.running:
        yield from _head_of_line(ledger, settings, living, head)
    else:
        yield from _parked_loads(ledger, settings, living, head)


# -------------------------------------------------------------------- stuck.never-fits


def _never_fits(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    state, at = ledger.state, ledger.at
    usable = state.total - state.reserved
    waiting = living.waiting
    for record in waiting:
        needed = blocks_to_run(ledger, record)
        if needed <= usable or record.blocks:
            continue
        if record.self_preemptions > 1 or (record.self_preemptions and record.cause != Cause.KV_BLOCKS):
            continue  # it may be let in all the same, as before: stuck.self-preempt tells
        behind = [other for other in waiting if other is not record and other.arrived_ns >= record.arrived_ns]
        at_head = bool(record.times_passed_over)
        began = record.since_ns if record.preemptions else record.arrived_ns
        asked = record.blocks_needed == needed  # else it follows from its tokens, of which its arrival tells
        needed_at = record.refused_at if asked else record.arrived_at
        if record.preemptions and not asked:
            needed_at = max(needed_at, record.preempted_at)
        tokens = usable * state.block_size
        held_back = (
            f" It stands at the head of the queue and holds back {counted(len(behind), 'request')} behind it:"
            f" {listed([r.id for r in behind])}."
            if at_head and behind
            else ""
        )
        yield Judgement(
            code=NEVER_FITS,
            engine=ledger.engine,
            key=record.id,
            verdict="confirmed",
            pending=ledger.age_s(began) < settings(NEVER_FITS, "grace_s"),
            since_ns=ledger.wall(began),
            position=at(record.since_at if record.preemptions else record.arrived_at),
            requests=(record.id,),
            evidence=(
                Evidence("blocks_needed", needed, "blocks", position=at(needed_at)),
                Evidence("blocks_usable", usable, "blocks", position=at(state.places.started)),
                Evidence("prompt_tokens", record.prompt_tokens, "tokens", position=at(record.arrived_at)),
                Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
                Evidence("running", len(living.running), "requests", position=at(state.places.moved)),
                Evidence("waiting_behind", len(behind), "requests", position=at(state.places.moved)),
                Evidence(
                    "times_passed_over",
                    record.times_passed_over,
                    "times",
                    position=at(record.passed_over_at if at_head else record.arrived_at),
                ),
                Evidence(
                    "engine_watchdog", watchdog((record,)), position=at(record.stalled_at) if record.stalled_ns else ""
                ),
            ),
            explanation=(
                f"Request {record.id} ({counted(record.prompt_tokens, 'prompt token')}) needs"
                f" {counted(needed, 'block')} at once and the whole pool has {usable:,}: however long it waits, it can"
                f" never run.{held_back}"
            ),
            do_now=(f"Abort {record.id} (close its connection); those behind it run at once.",),
            change=(
                f"Set --max-model-len {tokens}, what the pool holds: such a request is then refused at the door.",
                f"Or give the pool room for it, at least {needed + state.reserved} blocks:"
                f" {room_for(ledger, needed + state.reserved)}.",
            ),
            wont_help=NEVER_FITS_WONT_HELP,
        )


def blocks_to_run(ledger: EngineLedger, record: RequestState) -> int:
    """How many blocks a waiting request must get at once. A failed allocation names fewer: what was hit in the prefix
    cache is not asked for, though it must be there too. What a preempted request had generated is computed again with
    its prompt; with layers that keep only a window of it, only the engine can tell how much that takes.
    """
    needed = max(record.blocks_needed, record.blocks_to_admit)
    block_size = ledger.state.block_size
    if block_size and all(group.kind == "full_attention" for group in ledger.description.groups):
        needed = max(needed, -(-(record.prompt_tokens + record.output_tokens) // block_size))
    return needed


# -------------------------------------------------------------------- stuck.parked-loads


def _parked_loads(ledger: EngineLedger, settings: Settings, living: Living, head: RequestState) -> Iterator[Judgement]:
    """Nothing is launched, though the scheduler looks: those who wait with blocks hold what the head lacks."""
    state, at = ledger.state, ledger.at
    holders = [record for record in living.waiting if record is not head and record.blocks]
    if not holders or any(record.fetching_ns for record in living.waiting):
        return
    held = sorted({block for record in holders for block in record.blocks})
    if head.blocks_needed > head.blocks_free_then + len(held):
        return  # even with these it lacks some: whoever holds those is the trouble
    since = max(state.launched_ns, head.since_ns, *(record.since_ns for record in holders))
    age, grace = (ledger.looked_ns - since) / 1e9, settings(PARKED_LOADS, "grace_s")
    if age < grace / 2:
        return
    usable = state.total - state.reserved
    held_at = at(*(record.since_at for record in holders))
    since_at = at(state.places.launched, head.since_at, *(record.since_at for record in holders))
    yield Judgement(
        code=PARKED_LOADS,
        engine=ledger.engine,
        verdict=verdict_of(ledger),
        pending=age < grace or state.damaged,
        since_ns=ledger.wall(since),
        position=since_at,
        requests=tuple(record.id for record in holders),
        blocks=tuple(held),
        evidence=(
            Evidence("head", head.id, "request", position=at(head.passed_over_at)),
            Evidence("blocks_needed", head.blocks_needed, "blocks", position=at(head.refused_at)),
            Evidence("blocks_free_for_it", head.blocks_free_then, "blocks", position=at(head.refused_at)),
            Evidence("blocks_parked", len(held), "blocks", position=held_at),
            Evidence("share_of_pool", round(len(held) / usable, 4), "of the pool", position=held_at),
            Evidence("running", 0, "requests", position=at(state.places.moved)),
            Evidence("waiting", len(living.waiting), "requests", position=at(state.places.moved)),
            Evidence("no_step_for_s", round(age, 1), "s", position=since_at),
        ),
        explanation=(
            f"Nothing runs. {head.id}, at the head of the queue, lacks"
            f" {counted(head.blocks_needed - head.blocks_free_then, 'block')}; {counted(len(held), 'block')}"
            f" ({percent(len(held) / usable)} of the pool) belong to {listed([r.id for r in holders])}, whose KV has"
            f" been fetched and which {'waits' if len(holders) == 1 else 'wait'} behind it. Neither can go on without"
            f" the other, for {duration(age)} now."
        ),
        do_now=(f"Abort {head.id}, or {holders[-1].id} (close its connection): what one gives up lets the other run.",),
        change=(
            "vLLM: upgrade to a release that serves requests with fetched KV before others and keeps room for what is"
            " being fetched (#44560; 0.31 and later drain them first).",
            "Until then let fewer fetch at once: a lower --max-num-seqs, such that"
            " max_num_seqs × blocks of the longest prompt fit in the pool.",
        ),
        wont_help=(
            "Waiting: nothing runs, so nobody gives a block back.",
            "Sending less from now on: those that are stuck stay stuck.",
        ),
        missing=what_is_missing(ledger),
    )


# -------------------------------------------------------------------- stuck.head-of-line


def _head_of_line(ledger: EngineLedger, settings: Settings, living: Living, head: RequestState) -> Iterator[Judgement]:
    """The head waits for running requests to end; in the room that it leaves unused, others could run."""
    state, at = ledger.state, ledger.at
    age, grace = (ledger.looked_ns - head.since_ns) / 1e9, settings(HEAD_OF_LINE, "grace_s")
    usable = state.total - state.reserved
    if age < grace / 2 or state.free < settings(HEAD_OF_LINE, "min_free") * usable:
        return
    behind = [r for r in living.waiting if r is not head and not is_outside(r)]
    fitting = [record for record in behind if 0 < blocks_to_run(ledger, record) - len(record.blocks) <= state.free]
    if not fitting:
        return
    own = max(head.blocks_to_admit, -(-(head.prompt_tokens + head.output_tokens) // max(1, state.block_size)))
    yield Judgement(
        code=HEAD_OF_LINE,
        engine=ledger.engine,
        key=head.id,
        verdict=verdict_of(ledger),
        pending=age < grace or state.damaged,
        since_ns=ledger.wall(head.since_ns),
        position=at(head.since_at),
        requests=(head.id,),
        evidence=(
            Evidence("blocks_needed", head.blocks_needed, "blocks", position=at(head.refused_at)),
            Evidence("blocks_free_for_it", head.blocks_free_then, "blocks", position=at(head.refused_at)),
            Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
            Evidence("blocks_of_its_tokens", own, "blocks", position=at(head.arrived_at)),
            Evidence("share_free", round(state.free / usable, 4), "of the pool", position=at(state.places.pool)),
            Evidence("waiting_behind", len(behind), "requests", position=at(state.places.moved)),
            Evidence("that_would_fit", len(fitting), "requests", position=at(state.places.moved, state.places.pool)),
            Evidence("running", len(living.running), "requests", position=at(state.places.moved)),
            Evidence("waited_s", round(age, 1), "s", position=at(head.since_at)),
        ),
        explanation=(
            f"For {duration(age)} request {head.id} has stood at the head of the queue: it needs"
            f" {counted(head.blocks_needed, 'block')} and {state.free:,} ({percent(state.free / usable)} of the pool)"
            f" are free. {counted(len(fitting), 'request')} behind it would fit in these, first {fitting[0].id}, and"
            f" {'waits' if len(fitting) == 1 else 'wait'} with it."
        ),
        do_now=(
            f"If {head.id} is not urgent, abort it and send it again when less runs; those behind it run at once.",
        ),
        change=(
            "Send long requests to an engine of their own, so that short ones do not stand behind them.",
            "--scheduling-policy priority, and a higher priority value for requests that need many blocks: then they"
            " wait behind the others.",
            "Give the pool room (--kv-cache-memory-bytes, a higher --gpu-memory-utilization)"
            + (
                "."
                if head.blocks_needed <= own
                else f". The head's own tokens need only {own:,}: the engine asks for more than that before it lets"
                " one in, so a lower max_tokens in its request lets it in earlier."
            ),
        ),
        wont_help=(
            "A higher --max-num-seqs or --max-num-batched-tokens: blocks are short, not places in a step.",
            "Restarting: the same order of the same requests waits again.",
        ),
        missing=what_is_missing(ledger),
    )
