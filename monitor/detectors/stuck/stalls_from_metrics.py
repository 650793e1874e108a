"""What figures alone tell, where there is no stream: never more than likely.

stuck.never-fits       requests that wait with nothing running and an empty pool, for longer than a step
stuck.engine-stalled   a count of steps that stands still while requests run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sample_math import apart_s
from kvscope.monitor.detectors.stuck.engine_stalled import CHANGE, DO_NOW, ENGINE_STALLED, WONT_HELP
from kvscope.monitor.detectors.stuck.queue_head import NEVER_FITS, NEVER_FITS_WONT_HELP
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, duration, percent

EMPTY: Final = 0.02
"""The share of the pool below which it has room for anything that fits at all."""


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is stuck in an engine of which only figures are known."""
    if ledger.samples[-1].awake is not False:
        yield from _never_fits(ledger, settings)
        yield from _engine_stalled(ledger, settings)


def _never_fits(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    samples = list(ledger.samples)
    start = _last_stretch(
        samples, lambda s: s.running == 0 and bool(s.waiting) and s.usage is not None and s.usage < EMPTY
    )
    if start is None:
        return
    first, last = samples[start], samples[-1]
    waiting = last.waiting or 0
    if last.deferred and last.deferred >= waiting:
        return  # they wait for something other than room, and the engine says so
    age = _seconds(first, last)
    allowed = max(settings(NEVER_FITS, "figures_grace_s"), _longest_step_s(samples[:start], settings))
    for_room = "not exposed" if last.deferred is None else waiting - last.deferred
    told_apart = last.deferred is not None
    yield Judgement(
        code=NEVER_FITS,
        engine=ledger.engine,
        verdict="likely" if told_apart else "cannot-tell",
        pending=age < allowed,
        since_ns=first.at_ns or 0,
        position=first.position,
        evidence=(
            Evidence("waiting", waiting, "requests", last.source, last.position),
            Evidence("waiting_for_room", for_room, "requests", last.source, last.position),
            Evidence("running", 0, "requests", last.source, last.position),
            Evidence("usage", round(100 * (last.usage or 0), 1), "%", last.source, last.position),
            Evidence("lasted_s", round(age, 1), "s", last.source),
            Evidence("allowed_s", round(allowed, 1), "s"),
        ),
        explanation=(
            f"Since {clock_time(first.at_ns or 0)} ({duration(age)}) {counted(waiting, 'request')} waited with nothing"
            f" running and {percent(last.usage or 0)} of the pool in use: there is room, and the first of them is not"
            " let in. It needs more blocks than the whole pool has, and all behind it wait with it."
        ),
        do_now=("Abort the request that has waited longest (close its connection); those behind it run at once.",),
        change=(
            "Set --max-model-len to what the pool holds (the log's `KV cache size: … tokens`): such a request is then"
            " refused at the door.",
            "Or give the pool room for it (--kv-cache-memory-bytes, a higher --gpu-memory-utilization).",
        ),
        wont_help=NEVER_FITS_WONT_HELP,
        missing=(
            "how many blocks the first request needs: attach the event stream (monitor doctor tcp://HOST:5757). An"
            " engine that froze with its pool empty looks the same: ps -o stat= -p PID tells"
            if told_apart
            else "what they wait for (vllm:num_requests_waiting_by_reason, exposed since vLLM 0.20): a grammar that is"
            " compiled, or KV that is fetched, looks the same; the event stream tells it too"
        ),
    )


def _engine_stalled(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    last = ledger.samples[-1]
    counts_steps = last.steps is not None
    progress: Callable[[Sample], int | None] = (lambda s: s.steps) if counts_steps else (lambda s: s.generation_tokens)
    reached = progress(last)
    if not last.running or reached is None or (not counts_steps and _counts_at_the_end(ledger)):
        return
    samples = list(ledger.samples)
    start = _last_stretch(samples, lambda s: bool(s.running) and progress(s) == reached)
    if start is None or start == len(samples) - 1:
        return
    first = samples[start]
    age = _seconds(first, last)
    longest = _longest_step_s(samples[: start + 1], settings)
    allowed = max(settings(ENGINE_STALLED, "grace_s" if longest else "unseen_step_s"), longest)
    if not counts_steps:
        allowed = max(allowed, settings(ENGINE_STALLED, "first_step_s"))
    if age < allowed / 4:
        return
    what = "no step has ended" if counts_steps else "no token was generated"
    yield Judgement(
        code=ENGINE_STALLED,
        engine=ledger.engine,
        verdict="likely" if counts_steps else "cannot-tell",
        pending=age < allowed,
        since_ns=first.at_ns or 0,
        position=first.position,
        evidence=(
            Evidence("stalled_s", round(age, 1), "s", last.source),
            Evidence("allowed_s", round(allowed, 1), "s"),
            Evidence("steps", reached if counts_steps else "not exposed", "steps", last.source, first.position),
            Evidence("running", last.running, "requests", last.source, last.position),
            Evidence("waiting", "not exposed" if last.waiting is None else last.waiting, "requests", last.source),
            Evidence("samples_that_said_the_same", len(samples) - start, "samples", last.source),
        ),
        explanation=(
            f"Since {clock_time(first.at_ns or 0)} ({duration(age)}) {what}, with"
            f" {counted(last.running, 'request')} running. The metrics page still answers, with every figure as it was:"
            " it is served by the front end, and the engine behind it stands still."
        ),
        do_now=DO_NOW,
        change=CHANGE,
        wont_help=WONT_HELP,
        missing=(
            "whether a step is in flight: attach the event stream (monitor doctor tcp://HOST:5757), or look at the"
            " process's state (ps -o stat= -p PID)"
            if counts_steps
            else "the count of steps (vllm:iteration_tokens_total_count): a long prefill generates no token either"
        ),
    )


def _counts_at_the_end(ledger: EngineLedger) -> bool:
    """Whether tokens are counted only when their request ends, as SGLang does."""
    fact = ledger.facts.get("exposition")
    return fact is not None and fact.value == "sglang"


def _last_stretch(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int | None:
    """Where the last stretch of samples begins for which something holds; None if it does not hold at the end."""
    start = len(samples)
    while start > 0 and holds(samples[start - 1]):
        start -= 1
    return start if start < len(samples) else None


def _longest_step_s(samples: Sequence[Sample], settings: Settings) -> float:
    """What a step may take, by the longest time that the count of steps has stood still with requests running and then
    moved again; 0 if none was seen to end.
    """
    longest = 0.0
    began, ends_seen = 0, 0
    for index in range(1, len(samples)):
        before, sample = samples[index - 1], samples[index]
        ends_seen += sample.steps != before.steps
        if sample.steps != before.steps or not before.running:
            began = index
        longest = max(longest, _seconds(samples[began], sample))
    return settings(ENGINE_STALLED, "longest_times") * max(longest, 0.001) if ends_seen else 0.0


def _seconds(first: Sample, last: Sample) -> float:
    apart = apart_s(first, last)
    return apart if apart is not None else 0.0
