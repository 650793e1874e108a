"""Work that is done, thrown away and done again.

thrash.preemption      requests lose their blocks before these have given them a single token, again and again
thrash.cascade         one pass preempts many, though nothing becomes free by it
thrash.after-retract   long after a preemption far fewer run than before, though others wait and there is room

All need the event stream: an engine's own counter of preemptions tells neither what they cost nor whom they hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

from kvscope.monitor.detectors.advice import whole_prompts_only
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import LOST, at, cost_of, freed_nothing, names, of_late, passes
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import Preemption
from kvscope.monitor.text import clock_time, counted, duration, percent

PREEMPTION = "thrash.preemption"
CASCADE = "thrash.cascade"
AFTER_RETRACT = "thrash.after-retract"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What one engine does over and over."""
    if ledger.has_stream and ledger.preempted:
        yield from _preemption(ledger, settings)
        yield from _cascade(ledger, settings)
        yield from _after_retract(ledger, settings)


# -------------------------------------------------------------------- thrash.preemption


def _preemption(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    window_s = settings(PREEMPTION, "window_s")
    recent = of_late(ledger, window_s)
    in_vain = [one for one in recent if not one.outputs]
    hit = names(in_vain)
    if len(hit) < settings(PREEMPTION, "min_requests"):
        return
    wasted, last_at = sum(one.tokens_lost for one in in_vain), ledger.at(in_vain[-1].at)
    state = ledger.state
    first = at(ledger, ledger.now_ns - window_s * 1e9)
    computed = state.totals.computed_tokens - first.computed_tokens
    if wasted < settings(PREEMPTION, "min_share") * max(computed, 1):
        return
    began = in_vain[0].at_ns
    yield Judgement(
        code=PREEMPTION,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        since_ns=ledger.wall(began),
        position=ledger.at(in_vain[0].at),
        requests=hit,
        evidence=(
            Evidence("preemptions", len(recent), "preemptions", position=ledger.at(recent[-1].at)),
            Evidence("preemptions_without_output", len(in_vain), "preemptions", position=last_at),
            Evidence("requests_preempted_without_output", len(hit), "requests", position=last_at),
            Evidence("tokens_computed_in_vain", wasted, "tokens", position=last_at),
            Evidence("tokens_computed", computed, "tokens", position=ledger.at(state.places.progressed)),
            Evidence(
                "share_computed_in_vain",
                round(wasted / max(computed, 1), 4),
                "of the computed",
                position=ledger.at(in_vain[-1].at, state.places.progressed),
            ),
            Evidence(
                "most_for_one_request", max(map([o.id for o in in_vain].count, hit)), "preemptions", position=last_at
            ),
        ),
        explanation=(
            f"Since {clock_time(ledger.wall(began))}, {counted(len(hit), 'request')} lost their blocks"
            f" {counted(len(in_vain), 'time')} before these had given them one token of output:"
            f" {counted(wasted, 'token')} were computed in vain, {percent(min(wasted / max(computed, 1), 1))} of all"
            " that was computed. They are let in while there is room for a part of their prompts, and then take the"
            " room from each other."
        ),
        do_now=("Let fewer in at once: have clients or the router send less to this engine until it has caught up.",),
        change=(
            f"Let a prompt in only if all of it has room: {whole_prompts_only(ledger)}.",
            f"Lower --max-num-seqs to {_fit_at_full_length(ledger, hit)} (it is {ledger.description.max_num_seqs}):"
            " so many of these the pool holds at full length.",
        ),
        wont_help=(
            "A larger --max-num-batched-tokens: the prompts are computed faster, and thrown away as often.",
            "Looking at the engine's own counter of preemptions: it moves with the next token, which these do not get.",
        ),
        missing=LOST if ledger.state.damaged else "",
    )


def _fit_at_full_length(ledger: EngineLedger, names: Sequence[str]) -> int:
    """How many such requests the pool holds at their ends, by the largest of them."""
    records = filter(None, map(ledger.request, names))
    largest = max((record.blocks_to_finish for record in records), default=0)
    return max((ledger.state.total - ledger.state.reserved) // max(largest, 1), 1)


# -------------------------------------------------------------------- thrash.cascade


def _cascade(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    recent = of_late(ledger, settings(CASCADE, "remember_s"))
    fewest = settings(CASCADE, "min_requests")
    found = [one for one in passes(recent) if len(one) >= fewest and freed_nothing(one)]
    if not found:
        return
    last = found[-1]
    blocks, lost = sum(one.blocks for one in last), sum(one.tokens_lost for one in last)
    yield Judgement(
        code=CASCADE,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        since_ns=ledger.wall(found[0][0].at_ns),
        position=ledger.at(found[0][0].at),
        requests=names([one for together in found for one in together]),
        evidence=(
            *cost_of(ledger, last),
            Evidence(
                "blocks_given_back_meanwhile",
                last[-1].released - last[0].released,
                "blocks",
                position=ledger.at(last[-1].at),
            ),
            Evidence("cascades_seen", len(found), "times", position=ledger.at(last[-1].at)),
        ),
        explanation=(
            f"At {clock_time(ledger.wall(last[0].at_ns))} one pass of the scheduler preempted"
            f" {counted(len(last), 'request')} of the {last[0].running} that ran, and not one block became free by it:"
            f" the {counted(blocks, 'block')} that they gave back wait for a step in flight that may still write to"
            f" them, so each preemption led to the next. {counted(lost, 'token')} will be computed again. Seen"
            f" {counted(len(found), 'time')}."
        ),
        do_now=("Nothing is lost but time: those preempted go on by themselves, and are computed again.",),
        change=(
            "Run without overlapped steps until the release waits for blocks on their way back (vLLM:"
            " --no-async-scheduling, look for pull request 49675; kvscope's engine: drop --async-scheduling).",
            "Make preemptions rare: lower --max-num-seqs, or give the pool more (--gpu-memory-utilization).",
        ),
        wont_help=("Preempting others first, as the priority policy does: whoever is chosen, nothing becomes free.",),
        missing=LOST if ledger.state.damaged else "",
    )


# -------------------------------------------------------------------- thrash.after-retract


def _after_retract(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    enough_s, over_s = settings(AFTER_RETRACT, "quiet_s"), settings(AFTER_RETRACT, "over_s")
    last = ledger.wall(ledger.preempted[-1].at_ns)
    quiet_s = (ledger.now_ns - last) / 1e9
    state, head = ledger.state, ledger.head()
    if head is None or quiet_s < over_s or head.cause != Cause.MAX_NUM_SEQS or head.blocks_to_admit > state.free:
        return
    first = _first_of_the_last(ledger)
    began = ledger.wall(first.at_ns)
    before = _step_size(ledger, began - over_s * 1e9, began)
    now = _step_size(ledger, ledger.now_ns - over_s * 1e9, ledger.now_ns)
    if not now or before < settings(AFTER_RETRACT, "slower") * now:
        return
    over = list(takewhile(lambda point: point.at_ns >= ledger.now_ns - over_s * 1e9, reversed(ledger.points)))
    half = len(over) // 2
    running = max(point.running for point in over[: half + 1])
    if running > max(point.running for point in over[half:]):
        return  # it recovers
    waiting = [record for record in state.requests.values() if record.is_waiting]
    moved, before_at = ledger.at(state.places.moved), str(at(ledger, began).position or "")
    yield Judgement(
        code=AFTER_RETRACT,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=quiet_s < enough_s,
        since_ns=began,
        position=ledger.at(first.at),
        requests=tuple(record.id for record in waiting),
        evidence=(
            Evidence("output_tokens_a_step_before", round(before, 2), "tokens", position=before_at),
            Evidence("output_tokens_a_step_now", round(now, 2), "tokens", position=ledger.at(state.places.progressed)),
            Evidence("running_at_most", running, "requests", position=moved),
            Evidence("waiting", len(waiting), "requests", position=moved),
            Evidence(
                "max_num_seqs",
                ledger.description.max_num_seqs or "not said",
                "requests",
                position=ledger.at(state.places.started),
            ),
            Evidence("blocks_free", state.free, "blocks", position=ledger.at(state.places.pool)),
            Evidence("blocks_needed_by_the_head", head.blocks_to_admit, "blocks", position=ledger.at(head.arrived_at)),
            Evidence(
                "since_the_last_preemption_s", round(quiet_s, 1), "s", position=ledger.at(ledger.preempted[-1].at)
            ),
        ),
        explanation=(
            f"At {clock_time(began)} requests were preempted, and since then a step gives {now:.1f} tokens of output"
            f" where it gave {before:.1f}: no more than {counted(running, 'request')} run,"
            f" {counted(len(waiting), 'request')} wait, and {counted(state.free, 'block')} are free, of which the next"
            f" needs {head.blocks_to_admit}. The last preemption was {duration(quiet_s)} ago; the caution that it made"
            " the engine take was never given up."
        ),
        do_now=(
            "Drain the engine and restart it: what it lowered at the preemption is as configured after a start.",
            "Until then, send what waits to another engine.",
        ),
        change=(
            "Look for a newer release (SGLang: its issue 26248).",
            "Make preemptions rare, since each begins it anew: lower --max-num-seqs, or give the pool more"
            " (--gpu-memory-utilization, --kv-cache-memory-bytes).",
        ),
        wont_help=(
            "More KV memory alone: there is room now, and it is not used.",
            "A higher --max-num-seqs: that is not the limit that holds, though it is named.",
        ),
        missing=LOST if state.damaged else "",
    )


APART_NS: Final = 10_000_000_000
"""Preemptions further apart than this are not of one trouble."""


def _first_of_the_last(ledger: EngineLedger) -> Preemption:
    """The first of those that the last preemption belongs to."""
    first = ledger.preempted[-1]
    for one in reversed(ledger.preempted):
        if first.at_ns - one.at_ns > APART_NS:
            break
        first = one
    return first


def _step_size(ledger: EngineLedger, since: float, until: float) -> float:
    """Tokens of output a step, between two moments of wall time; 0 where no step was made."""
    first, last = at(ledger, since), at(ledger, until)
    steps = last.steps - first.steps
    return (last.output_tokens - first.output_tokens) / steps if steps > 0 else 0.0
