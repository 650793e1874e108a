"""Requests that are let in and get nowhere.

stuck.zero-token       runs, and is given no token at any step
stuck.encoder-budget   is passed over for room in the encoder's cache, at every step
stuck.self-preempt     fills the pool, preempts itself for one block more, and is let in again

The first two need the cause for which the engine says that a request was passed over, the third its preemptions.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.encoder import hold_one_another
from kvscope.monitor.detectors.stuck.waiting_requests import (
    Living,
    judged,
    overdue,
    requests,
    since_in_words,
    verdict_of,
    what_is_missing,
)
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted, duration, percent

ZERO_TOKEN = "stuck.zero-token"
ENCODER_BUDGET = "stuck.encoder-budget"
SELF_PREEMPT = "stuck.self-preempt"


def judge(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    """Who gets nowhere, though it has its turn."""
    yield from _zero_token(ledger, settings, [r for r in living.running if r.cause == Cause.ZERO_TOKENS])
    encoder = [r for records in (living.running, living.waiting) for r in records if r.cause == Cause.ENCODER]
    if not hold_one_another(ledger):  # else leak.encoder-cache has them
        yield from _encoder_budget(ledger, settings, encoder)
    for records in (living.running, living.waiting):
        for record in records:
            if record.self_preemptions > 1 and record.output_tokens == record.self_preempted_outputs:
                yield _self_preempt(ledger, settings, record)


# -------------------------------------------------------------------- stuck.zero-token


def _zero_token(ledger: EngineLedger, settings: Settings, passed_over: list[RequestState]) -> Iterator[Judgement]:
    state, at = ledger.state, ledger.at
    late = overdue(passed_over, lambda r: r.since_ns, ledger.looked_ns, settings(ZERO_TOKEN, "grace_s"))
    if late is None:
        return
    count = len(late.records)
    blocks = sorted({block for record in late.records for block in record.blocks})
    first = late.records[0]
    yield judged(
        ledger,
        late,
        code=ZERO_TOKEN,
        began_at=first.since_at,
        blocks=tuple(blocks),
        evidence=(
            Evidence("requests_at_zero", count, "requests", position=at(*(record.since_at for record in late.records))),
            Evidence("longest_s", round(late.age_s, 1), "s", position=at(first.since_at)),
            Evidence(
                "times_passed_over", first.times_passed_over, "times, at the least", position=at(first.passed_over_at)
            ),
            Evidence("computed_tokens", first.computed_tokens, "tokens", position=at(first.since_at)),
            Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
            Evidence("blocks_held", len(blocks), "blocks", position=at(state.places.pool)),
            Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
        ),
        explanation=(
            f"{requests(late)} {'runs and is' if count == 1 else 'run and are'} given 0 tokens at every step,"
            f" {since_in_words(ledger, late)} ({duration(late.age_s)}; passed over {first.times_passed_over:,} times at"
            f" the least). {counted(state.free, 'block')} {'is' if state.free == 1 else 'are'} free, so it is not for"
            f" want of room; {counted(len(blocks), 'block')} {'is' if len(blocks) == 1 else 'are'} held for it."
        ),
        do_now=(f"Abort {'it' if count == 1 else 'them'} (close the connection): its blocks come back, others go on.",),
        change=(
            "It is a defect of the engine, which rounds a request's share of a step down to nothing: report it with"
            " the request's story (monitor explain request ID), and upgrade.",
            "vLLM with Mamba layers and prefix caching: a --max-num-batched-tokens of at least one aligned block, or"
            " --no-enable-prefix-caching (#40707); pooling models: #55427.",
        ),
        wont_help=(
            "A larger pool (gpu_memory_utilization): blocks are free.",
            "Waiting: nothing that it waits for will change.",
        ),
    )


# -------------------------------------------------------------------- stuck.encoder-budget


def _encoder_budget(ledger: EngineLedger, settings: Settings, passed_over: list[RequestState]) -> Iterator[Judgement]:
    late = overdue(passed_over, lambda r: r.since_ns, ledger.looked_ns, settings(ENCODER_BUDGET, "grace_s"))
    if late is None:
        return
    state, at, count = ledger.state, ledger.at, len(late.records)
    yield Judgement(
        code=ENCODER_BUDGET,
        engine=ledger.engine,
        verdict="likely",
        pending=late.pending or state.damaged,
        since_ns=ledger.wall(late.since_ns),
        position=at(late.records[0].since_at),
        requests=late.ids,
        evidence=(
            Evidence("requests_waiting", count, "requests", position=at(*(record.since_at for record in late.records))),
            Evidence("longest_s", round(late.age_s, 1), "s", position=at(late.records[0].since_at)),
            Evidence(
                "times_passed_over",
                late.records[0].times_passed_over,
                "times, at the least",
                position=at(late.records[0].passed_over_at),
            ),
            Evidence("blocks_free", state.free, "blocks", position=at(state.places.pool)),
            Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
        ),
        explanation=(
            f"{requests(late)} {'is' if count == 1 else 'are'} passed over for the encoder at every step,"
            f" {since_in_words(ledger, late)} ({duration(late.age_s)}), with {counted(state.free, 'block')} free: an"
            " image, a video or a sound in it is larger than the encoder's cache, or others keep that cache full."
        ),
        do_now=(
            f"Abort {'it' if count == 1 else 'them'} (close the connection); send the item smaller, of fewer frames.",
        ),
        change=(
            "Bound what an item may become before it is sent (vLLM: --mm-processor-kwargs, --limit-mm-per-prompt).",
            "Give the encoder more at once: in vLLM its budget and its cache follow --max-num-batched-tokens.",
            "Upgrade: newer vLLM refuses an item that its encoder's cache cannot hold (PR #33110, #41969).",
        ),
        wont_help=(
            "A larger KV pool: blocks are free; the encoder's cache is another.",
            "Waiting, if the item alone is too large.",
        ),
        missing="how large the item and the encoder's cache are: the event stream tells neither, the engine's log may",
    )


# -------------------------------------------------------------------- stuck.self-preempt


def _self_preempt(ledger: EngineLedger, settings: Settings, record: RequestState) -> Judgement:
    state, at = ledger.state, ledger.at
    usable = state.total - state.reserved
    preempted_at = at(record.preempted_at)
    times = record.self_preemptions
    holds = usable * state.block_size
    return Judgement(
        code=SELF_PREEMPT,
        engine=ledger.engine,
        key=record.id,
        verdict=verdict_of(ledger),
        pending=times < settings(SELF_PREEMPT, "min_times"),
        since_ns=ledger.wall(record.self_preempted_ns),
        position=preempted_at,
        requests=(record.id,),
        blocks=tuple(sorted(record.blocks)),
        evidence=(
            Evidence("preempted_itself", times, "times in a row", position=preempted_at),
            Evidence("output_tokens", record.output_tokens, "tokens", position=preempted_at),
            Evidence("peak_blocks", record.peak_blocks, "blocks", position=preempted_at),
            Evidence("blocks_usable", usable, "blocks", position=at(state.places.started)),
            Evidence("share_of_pool", round(record.peak_blocks / usable, 4), "of the pool", position=preempted_at),
            Evidence("tokens_lost", record.tokens_lost, "tokens", position=preempted_at),
        ),
        explanation=(
            f"Request {record.id} has filled the pool ({record.peak_blocks:,} of {usable:,} blocks,"
            f" {percent(record.peak_blocks / usable)}), needed one more with nobody else to take it from, preempted"
            f" itself and was let in again: {counted(times, 'time')} in a row since"
            f" {clock_time(ledger.wall(record.self_preempted_ns))}, with no token of output in between."
            f" {counted(record.tokens_lost, 'token')} were computed for nothing, and so it goes on."
        ),
        do_now=(f"Abort {record.id} (close its connection): nothing else ends it, and others wait for its blocks.",),
        change=(
            f"Set --max-model-len {holds}, what the pool holds: such a request then ends there, in good order.",
            f"Or give the pool room for it, more than {usable + state.reserved} blocks (--kv-cache-memory-bytes, a"
            " higher --gpu-memory-utilization, no --num-gpu-blocks-override).",
        ),
        wont_help=(
            "Lowering the load, or max_num_seqs: it is alone in the pool.",
            "Watching the preemption counter: vLLM's moves only with a victim's next output, which never comes.",
        ),
        missing=what_is_missing(ledger),
    )
