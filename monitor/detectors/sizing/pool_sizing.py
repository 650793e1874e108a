"""A pool, or a block, that does not suit what requests ask of it. Needs the event stream.

sizing.kv-too-small     fewer full-length requests fit than may run, and preemptions pay for it
sizing.block-inflated   blocks so large that the requests that hold them leave most of each empty
"""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import LOST, at, names, of_late
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, percent

KV_TOO_SMALL = "sizing.kv-too-small"
BLOCK_INFLATED = "sizing.block-inflated"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What one engine's pool is too small, or too coarse, for."""
    if ledger.preempted:
        yield from _kv_too_small(ledger, settings)
    yield from _block_inflated(ledger, settings)


# -------------------------------------------------------------------- sizing.kv-too-small


def _kv_too_small(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state, described = ledger.state, ledger.description
    # Of several groups each takes blocks of its own, as many as its kind of layer needs: the sum below would be wrong.
    if not (described.max_model_len and described.max_num_seqs and state.block_size) or len(described.groups) > 1:
        return
    window_s = settings(KV_TOO_SMALL, "window_s")
    recent = of_late(ledger, window_s)
    usable = state.total - state.reserved
    longest = -(-described.max_model_len // state.block_size)
    concurrency = usable / longest
    if len(recent) < settings(KV_TOO_SMALL, "min_preemptions") or concurrency >= described.max_num_seqs:
        return
    lost = sum(one.tokens_lost for one in recent)
    computed = state.totals.computed_tokens - at(ledger, ledger.now_ns - window_s * 1e9).computed_tokens
    if lost < settings(KV_TOO_SMALL, "min_share") * max(computed, 1):
        return
    began = ledger.wall(recent[0].at_ns)
    wanted = longest * described.max_num_seqs
    bytes_wanted = wanted * described.kv_bytes_per_block
    yield Judgement(
        code=KV_TOO_SMALL,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=ledger.now_ns - began < settings(KV_TOO_SMALL, "over_s") * 1e9,
        since_ns=began,
        position=ledger.at(recent[0].at),
        requests=names(recent),
        evidence=(
            Evidence(
                "full_length_requests_that_fit",
                round(concurrency, 2),
                "requests",
                position=ledger.at(state.places.started),
            ),
            Evidence("max_num_seqs", described.max_num_seqs, "requests", position=ledger.at(state.places.started)),
            Evidence("max_model_len", described.max_model_len, "tokens", position=ledger.at(state.places.started)),
            Evidence("pool", usable, "blocks", position=ledger.at(state.places.started)),
            Evidence("blocks_for_all_at_full_length", wanted, "blocks", position=ledger.at(state.places.started)),
            Evidence("preemptions", len(recent), "preemptions", position=ledger.at(recent[-1].at)),
            Evidence("tokens_lost", lost, "tokens", position=ledger.at(recent[-1].at)),
            Evidence("tokens_computed", computed, "tokens", position=ledger.at(state.places.progressed)),
        ),
        explanation=(
            f"The pool holds {counted(usable * state.block_size, 'token')}, {concurrency:.1f} requests of"
            f" max_model_len {described.max_model_len:,}, and up to {described.max_num_seqs} may run: since"
            f" {clock_time(began)} there were {counted(len(recent), 'preemption')} for want of blocks, which cost"
            f" {counted(lost, 'token')}, {percent(min(lost / max(computed, 1), 1))} of what was computed."
        ),
        do_now=("Send this engine less at once: what cannot be held together is computed twice.",),
        change=(
            f"Lower --max-num-seqs to {max(1, int(concurrency))}, which fits whatever the requests' lengths; or to what"
            " your own lengths allow.",
            "Give the pool more: a higher --gpu-memory-utilization"
            + (
                f", or --kv-cache-memory-bytes {bytes_wanted} ({wanted:,} blocks) for all of them at full length."
                if bytes_wanted
                else "."
            ),
            f"Lower --max-model-len from {described.max_model_len}, if no request is that long.",
        ),
        wont_help=("Restarting: the pool is as large as it was configured, and nothing of it is lost.",),
        missing=LOST if state.damaged else "",
    )


# -------------------------------------------------------------------- sizing.block-inflated


def _block_inflated(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    if state.block_size < settings(BLOCK_INFLATED, "min_block"):
        return
    holders = [record for record in state.requests.values() if record.is_running and record.blocks]
    if len(holders) < settings(BLOCK_INFLATED, "min_requests"):
        return
    held = sum(record.computed_tokens for record in holders)
    blocks = sum(len(record.blocks) for record in holders)
    groups = max(1, len(ledger.description.groups))
    reserved = blocks * state.block_size // groups
    usable = max(1, state.total - state.reserved)
    if state.used < settings(BLOCK_INFLATED, "min_usage") * usable:
        return
    if held > settings(BLOCK_INFLATED, "max_filled") * reserved:
        return
    yield Judgement(
        code=BLOCK_INFLATED,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        since_ns=ledger.wall(min(record.admitted_ns for record in holders)),
        position=ledger.at(min(holders, key=lambda record: record.admitted_ns).since_at),
        requests=tuple(record.id for record in holders),
        evidence=(
            Evidence("block_size", state.block_size, "tokens", position=ledger.at(state.places.started)),
            Evidence("kv_groups", groups, "groups", position=ledger.at(state.places.started)),
            Evidence("requests", len(holders), "requests", position=ledger.at(state.places.moved)),
            Evidence("blocks_held", blocks, "blocks", position=ledger.at(state.places.pool)),
            Evidence("tokens_reserved", reserved, "tokens", position=ledger.at(state.places.pool)),
            Evidence("tokens_held", held, "tokens", position=ledger.at(state.places.progressed)),
            Evidence(
                "share_filled",
                round(held / reserved, 4),
                "of the reserved",
                position=ledger.at(state.places.pool, state.places.progressed),
            ),
            Evidence("usage", round(100 * state.used / usable, 1), "%", position=ledger.at(state.places.pool)),
        ),
        explanation=(
            f"A block is {state.block_size:,} tokens, and the {len(holders)} requests that run fill"
            f" {percent(held / reserved)} of the {counted(blocks, 'block')} that they hold: usage is"
            f" {percent(state.used / usable)}, most of it room that no token is in. On a hybrid model the block of"
            " attention is made as large as the state of its other layers."
        ),
        do_now=("Nothing is broken; fewer short requests fit at once than the pool's size in tokens suggests.",),
        change=(
            "Make the state of the other layers smaller, which the block follows (vLLM: --mamba-cache-dtype,"
            " --mamba-ssm-cache-dtype), or take a release that keeps them apart.",
            "Plan by blocks, not by tokens: each request costs at least one block of each group.",
        ),
        wont_help=(
            "A smaller --block-size: for such a model it is raised again at the start.",
            "Prefix caching: a prompt shorter than a block is never hit.",
        ),
        missing=LOST if state.damaged else "",
    )
