"""Requests, or the whole engine, that do not move.

stuck.never-fits needs arrivals or allocation failures of the stream (confirmed), or figures: requests that wait with
nothing running and an empty pool, for longer than a step (likely). stuck.engine-stalled needs steps and heartbeats
(silence alone is likely, not confirmed), or a count of steps that stands still while requests run (likely).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from monitor.detectors.figures import apart_s
from monitor.detectors.judgement import Evidence, Judgement, Verdict
from monitor.detectors.thresholds import Settings
from monitor.events.records import RequestState, StepInFlight
from monitor.events.sample import Sample
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import clock_time, counted, duration, listed, percent

NEVER_FITS = "stuck.never-fits"
ENGINE_STALLED = "stuck.engine-stalled"
HEARTBEAT_S = 1.0
"""How often an engine that lives is heard."""
EMPTY: Final = 0.02
"""The share of the pool below which it has room for anything that fits at all."""
_STALLED_DO_NOW: Final = (
    "Dump the process's stacks before anything else (py-spy dump --pid PID): they name the call that hangs.",
    "Take the engine out of rotation: its /health may still answer 200. Then restart it.",
)
_STALLED_CHANGE: Final = (
    "Let the load balancer probe progress (kvscope's /metrics, or a one-token request), not /health.",
)
_STALLED_WONT_HELP: Final = ("Waiting for the queue to drain, or lowering the load: nothing runs.",)
_NEVER_FITS_WONT_HELP: Final = (
    "Waiting, or lowering the load: even an empty pool is too small.",
    "Restarting: the same request wedges it again.",
)


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What is stuck in one engine."""
    if ledger.has_stream:
        yield from _never_fits(ledger, settings)
        yield from _engine_stalled(ledger, settings)
    elif ledger.samples and ledger.samples[-1].awake is not False:
        yield from _never_fits_by_figures(ledger, settings)
        yield from _engine_stalled_by_figures(ledger, settings)


# -------------------------------------------------------------------- from the stream


def _never_fits(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    usable = state.total - state.reserved
    waiting = [record for record in state.requests.values() if record.is_waiting]
    for record in waiting:
        needed = _blocks_to_run(ledger, record)
        if needed <= usable or record.blocks:
            continue
        behind = [other for other in waiting if other is not record and other.arrived_ns >= record.arrived_ns]
        at_head = bool(record.times_passed_over)
        age = ledger.age_s(record.arrived_ns)
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
            pending=age < settings(NEVER_FITS, "grace_s"),
            since_ns=ledger.wall(record.arrived_ns),
            position=str(ledger.position()),
            requests=(record.id,),
            evidence=(
                Evidence("blocks_needed", needed, "blocks"),
                Evidence("blocks_usable", usable, "blocks"),
                Evidence("prompt_tokens", record.prompt_tokens, "tokens"),
                Evidence("blocks_free", state.free, "blocks"),
                Evidence("running", sum(r.is_running for r in state.requests.values()), "requests"),
                Evidence("waiting_behind", len(behind), "requests"),
                Evidence("times_passed_over", record.times_passed_over, "times"),
                Evidence("engine_watchdog", _watchdog((record,))),
            ),
            explanation=(
                f"Request {record.id} ({counted(record.prompt_tokens, 'prompt token')}) needs"
                f" {counted(needed, 'block')} at once and the whole pool has {usable:,}: however long it waits, it can"
                f" never run.{held_back}"
            ),
            do_now=(f"Abort {record.id} (close its connection); those behind it run at once.",),
            change=(
                f"Set --max-model-len {tokens}, what the pool holds: such a request is then refused at the door.",
                f"Or give the pool room for it, at least {needed + state.reserved} blocks (--kv-cache-memory-bytes, a"
                " higher --gpu-memory-utilization, no --num-gpu-blocks-override).",
            ),
            wont_help=_NEVER_FITS_WONT_HELP,
        )


def _blocks_to_run(ledger: EngineLedger, record: RequestState) -> int:
    """How many blocks a waiting request must get at once. A failed allocation names fewer: what was hit in the prefix
    cache is not asked for, though it must be there too. What a preempted request had generated is computed again with
    its prompt; with layers that keep only a window of it, only the engine can tell how much that takes.
    """
    needed = max(record.blocks_needed, record.blocks_to_admit)
    block_size = ledger.state.block_size
    if block_size and all(group.kind == "full_attention" for group in ledger.description.groups):
        needed = max(needed, -(-(record.prompt_tokens + record.output_tokens) // block_size))
    return needed


def _watchdog(records: Iterable[RequestState]) -> str:
    """What the engine's own watchdog says of them; one that never spoke may not be there, or not be due yet."""
    stalled = [record for record in records if record.stalled_ns]
    if not stalled:
        return "has not spoken"
    step = min(record.stalled_since_step for record in stalled)
    since = f"since step {step}" if step >= 0 else "since before any step"
    return f"says so too, of {counted(len(stalled), 'request')}, {since}"


def _engine_stalled(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    running = [record for record in state.requests.values() if record.is_running]
    waiting = [record for record in state.requests.values() if record.is_waiting]
    in_flight = _steps_in_flight(ledger)
    if state.stopped_ns or not (running or waiting or in_flight):
        return
    silent_s = (ledger.now_ns - ledger.heard_ns) / 1e9
    heard = silent_s < 3 * HEARTBEAT_S
    step = min(in_flight, key=lambda s: s.since_ns, default=None)
    grace = settings(ENGINE_STALLED, "grace_s")
    if step is not None:
        allowed = max(grace, _expected_s(ledger, settings, step))
        since = step.since_ns
        what = f"step {step.step} ({counted(step.tokens, 'token')}) was launched and has not completed"
    elif heard and (ledger.passes_advanced or not ledger.heartbeats):
        return  # the scheduler looks and finds nothing that it may run (or we came too late to tell): no stall
    else:
        allowed = grace
        since = max(state.now_ns, _last_progress(running))
        what = "no step was launched though there is work"
    age = ledger.age_s(since)
    if not heard:
        age = max(age if step else 0.0, silent_s)
    if age < allowed / 2:
        return
    verdict: Verdict = "confirmed" if heard and not state.damaged else "likely"
    if heard:
        alive = "The process lives: its event stream's own thread still answers."
    else:
        alive = f"Nothing at all has been heard of the process for {duration(silent_s)}: it is frozen, dead or cut off."
    yield Judgement(
        code=ENGINE_STALLED,
        engine=ledger.engine,
        verdict=verdict,
        pending=age < allowed,
        since_ns=ledger.wall(since),
        position=str(ledger.position()),
        requests=tuple(record.id for record in (*running, *waiting)),
        evidence=(
            Evidence("stalled_s", round(age, 1), "s"),
            Evidence("allowed_s", round(allowed, 1), "s"),
            Evidence("silent_s", round(silent_s, 1), "s"),
            Evidence("step_in_flight", step.step if step else "none", "step"),
            Evidence("tokens_in_flight", step.tokens if step else 0, "tokens"),
            Evidence("last_step", state.last_step, "step"),
            Evidence("running", len(running), "requests"),
            Evidence("waiting", len(waiting), "requests"),
            Evidence("engine_watchdog", _watchdog((*running, *waiting))),
        ),
        explanation=(
            f"Since {clock_time(ledger.wall(since))} ({duration(age)}) {what}, with {counted(len(running), 'request')}"
            f" running and {len(waiting):,} waiting. {alive}"
        ),
        do_now=_STALLED_DO_NOW,
        change=_STALLED_CHANGE,
        wont_help=_STALLED_WONT_HELP,
        missing="" if verdict == "confirmed" else "a heartbeat, or the process's state (ps -o stat= -p PID)",
    )


def _steps_in_flight(ledger: EngineLedger) -> list[StepInFlight]:
    """Steps launched and not completed; one that a later heartbeat does not name is over, and its end was lost."""
    beat = ledger.state.heartbeat
    return [
        step
        for step in ledger.state.in_flight.values()
        if beat is None or beat.at_ns <= step.since_ns or beat.step_in_flight == step.step
    ]


def _expected_s(ledger: EngineLedger, settings: Settings, step: StepInFlight) -> float:
    """How long a step of so many tokens may take, by what tokens have cost so far; generous for a first step."""
    totals = ledger.state.totals
    if not totals.steps or not totals.computed_tokens:
        return settings(ENGINE_STALLED, "first_step_s")
    per_token = totals.step_ns / totals.computed_tokens
    return settings(ENGINE_STALLED, "slower_than_expected") * per_token * step.tokens / 1e9


def _last_progress(running: list[RequestState]) -> int:
    return max((record.progressed_ns for record in running), default=0)


# -------------------------------------------------------------------- from figures alone


def _never_fits_by_figures(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
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
        wont_help=_NEVER_FITS_WONT_HELP,
        missing=(
            "how many blocks the first request needs: attach the event stream (monitor doctor tcp://HOST:5757). An"
            " engine that froze with its pool empty looks the same: ps -o stat= -p PID tells"
            if told_apart
            else "what they wait for (vllm:num_requests_waiting_by_reason, exposed since vLLM 0.20): a grammar that is"
            " compiled, or KV that is fetched, looks the same; the event stream tells it too"
        ),
    )  # fmt: skip


def _engine_stalled_by_figures(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
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
        do_now=_STALLED_DO_NOW,
        change=_STALLED_CHANGE,
        wont_help=_STALLED_WONT_HELP,
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
