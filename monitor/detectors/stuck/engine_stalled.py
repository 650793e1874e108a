"""stuck.engine-stalled: steps stop with work pending.

From the stream: needs steps and heartbeats. Silence alone is only likely. A request that waits for something outside
the scheduler is no work: an engine that has no other may sleep. From metrics: a count of steps that stands still while
requests run, never more than likely. Where other ranks of the same server go on, it is stuck.rank-diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement, Verdict
from kvscope.monitor.detectors.sample_math import FEWEST_SAMPLES
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.stuck.rank_steps import AFTER_S, last_step_ns
from kvscope.monitor.detectors.stuck.sample_windows import (
    LEAST_SCRAPES,
    LONGEST_TIMES,
    last_window,
    moving_pause_s,
    scrape_interval_s,
    seconds_apart,
)
from kvscope.monitor.detectors.stuck.stack_evidence import stack_evidence, stack_text
from kvscope.monitor.detectors.stuck.stall_effects import NOTHING_MOVES
from kvscope.monitor.detectors.stuck.step_expectation import StepAllowance, StepLimits, step_allowance
from kvscope.monitor.detectors.stuck.waiting_requests import (
    LIVE_HEARTBEAT_S,
    watchdog_report,
)
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.written.standstill import LEAST_S, LEAST_UNKNOWN_S, TIMES_LONGEST
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.living_requests import Living, is_outside
from kvscope.monitor.state.records import RequestState, StepInFlight
from kvscope.monitor.text import clock_time, counted, duration

STALLED_DO_NOW: Final = (
    "Dump the process's stacks before anything else (py-spy dump --pid PID): they show the call that hangs.",
    "Take the engine out of rotation: its /health may still answer 200. Then restart it.",
)


UNSEEN_DO_NOW: Final = (
    "Dump the process's stacks first (py-spy dump --pid PID): they show a compilation, or a call that hangs.",
    "Take the engine out of rotation. Restart it only if the stack does not change: a restart compiles again.",
)


STALLED_CHANGE: Final = (
    "Let the load balancer probe progress (kvscope's /metrics, or a one-token request), not /health.",
)


STALLED_WONT_HELP: Final = ("Waiting for the queue to drain, or lowering the load: nothing runs.",)


def steps_in_flight(ledger: EngineLedger) -> list[StepInFlight]:
    """Return steps launched and not completed. A step that a later heartbeat does not name is over, and its end was
    lost.

    A launch that the engine has not handed over yet is known from the heartbeat alone: its tokens are 0.
    """
    state, beat = ledger.state, ledger.state.heartbeat
    steps = [
        step
        for step in state.in_flight.values()
        if beat is None or beat.at_ns <= step.since_ns or beat.step_in_flight == step.step
    ]
    if beat is not None and beat.step_in_flight > state.last_step and beat.step_in_flight not in state.in_flight:
        since_ns = beat.in_flight_since_ns
        steps.append(StepInFlight(beat.step_in_flight, since_ns, beat.running, 0, state.places.completed))
    return steps


def _last_progress(running: list[RequestState]) -> int:
    return max((record.progressed_ns for record in running), default=0)


def _counts_at_the_end(ledger: EngineLedger) -> bool:
    """Whether tokens are counted only when their request ends, as SGLang does."""
    fact = ledger.facts.get("exposition")
    return fact is not None and fact.value == "sglang"


PROCESS_IS_ALIVE: Final = "The process is alive: the thread of its event stream still responds."
NOTHING_RECEIVED: Final = "The process has sent nothing"
NO_ACTIVITY: Final = "a heartbeat, or the process's state (ps -o stat= -p PID)"
NO_STACK: Final = "whether the step is only slow: a stack of the process (py-spy dump --pid PID)"


class EngineStalled(Detector[Judgement]):
    """An engine whose steps have stopped with work pending."""

    code = "stuck.engine-stalled"
    severity = "critical"
    title = "Steps have stopped with work pending"
    requires = ("stream", "metrics", "log")
    position = 296

    text_least_s = LEAST_S
    text_unknown_s = LEAST_UNKNOWN_S
    text_times_longest = TIMES_LONGEST
    grace_s = Threshold(4.5, "s", "no pause between steps, a garbage collection or a swapped page, is this long")
    slower_than_expected = Threshold(
        1.5, "times", "the model of step times is at most this far off, apart from the measured jitter"
    )
    early_steps = Threshold(
        50, "steps", "the first steps compile kernels, and the model of step times learns from them"
    )
    first_step_s = Threshold(
        50, "s", "how long a step of a kind not seen before may take: it may compile, and large models take 30 s a step"
    )
    first_of_epoch_s = Threshold(
        300,
        "s",
        "the first step of a large model may compile for minutes. Until then, a stall in it is information",
    )
    most_growth = Threshold(
        5,
        "times",
        "a step larger than any before takes at most proportionally longer. Far larger ones are another kind",
    )
    longest_times = LONGEST_TIMES
    least_scrapes = LEAST_SCRAPES
    pause_s = Threshold(
        60, "s", "where only metrics are known, a pause for new weights, a profile or a compilation looks the same"
    )
    sample_need = SampleNeed(6, pause_s, "requests run, and neither steps nor tokens move")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the stall of the engine, whatever its server's other ranks do."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings, ledger.living())
        elif ledger.samples and ledger.samples[-1].awake is not False:
            yield from self._from_samples(ledger, settings)

    def detect_rank(
        self, ledger: EngineLedger, siblings: Sequence[EngineLedger], settings: Settings
    ) -> Iterator[Judgement]:
        """Yield the stall unless other ranks go on, which is stuck.rank-diverged."""
        for stall in self.detect(ledger, settings):
            if not self.ranks_going_on(stall, siblings, settings):
                yield stall

    def ranks_going_on(
        self, stall: Judgement, siblings: Sequence[EngineLedger], settings: Settings
    ) -> list[EngineLedger]:
        """Return the ranks that launched a step well after the stall began, and do not stand still themselves."""
        if not stall.since_ns:
            return []
        from_ns = stall.since_ns + settings(AFTER_S) * 1e9
        return [
            other for other in siblings if last_step_ns(other) > from_ns and not self._stands_still(other, settings)
        ]

    def _stands_still(self, ledger: EngineLedger, settings: Settings) -> bool:
        return any(not stall.pending for stall in self.detect(ledger, settings))

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return NOTHING_MOVES

    def _from_stream(self, ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
        """Whether the whole engine stands still."""
        state, at = ledger.state, ledger.at
        # A request in no queue is no work for the scheduler: it is stuck.lost-request.
        running = [record for record in living.running if not record.not_queued_ns]
        waiting = [record for record in living.waiting if not record.not_queued_ns]
        if state.stopped_ns or not (running or waiting or steps_in_flight(ledger)):
            return
        silent_s = (ledger.now_ns - ledger.last_received_ns) / 1e9
        is_received = silent_s < 3 * LIVE_HEARTBEAT_S
        halt = _halt(ledger, running, waiting, is_received)
        if halt is None:
            return
        step, since, what = halt
        grace = settings(self.grace_s)
        since_at = at(step.at) if step else at(state.places.completed, state.places.moved)
        age = ledger.age_s(since)
        if not is_received:
            age = max(age if step else 0.0, silent_s)
        if age < grace / 2:
            return
        allowance = step_allowance(ledger, settings, self._step_limits(), step) if step is not None else None
        allowed = allowance.allowed_s if allowance is not None else grace
        if age < allowed / 2:
            return
        longest = settings(self.longest_times) * allowance.longest_s if allowance is not None else 0.0
        known = allowance is None or (not allowance.unseen and age > longest)
        verdict: Verdict = "confirmed" if is_received and known and not state.damaged else "likely"
        if age < allowed and allowance is not None and allowance.unseen:
            verdict = "cannot-tell"
        quiet = allowance is not None and age < allowance.information_s
        alive = (
            PROCESS_IS_ALIVE
            if is_received
            else f"{NOTHING_RECEIVED} for {duration(silent_s)}: it is frozen, dead or cut off."
        )
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict=verdict,
            severity="info" if quiet else None,
            pending=age < allowed,
            since_ns=ledger.wall(since),
            position=since_at,
            requests=tuple(record.id for record in (*running, *waiting)),
            evidence=(
                *_stall_evidence(ledger, living, step, age, allowed, since_at),
                *_expectation_evidence(allowance, since_at),
                *stack_evidence(ledger, since),
            ),
            explanation=(
                f"Since {clock_time(ledger.wall(since))} ({duration(age)}) {what}, with"
                f" {counted(len(running), 'request')} running and {len(waiting):,} waiting."
                f"{_expectation_text(allowance)} {alive}{stack_text(state, since)}"
            ),
            do_now=UNSEEN_DO_NOW if allowance and allowance.unseen else STALLED_DO_NOW,
            change=STALLED_CHANGE,
            wont_help=STALLED_WONT_HELP,
            missing="" if verdict == "confirmed" else NO_STACK if is_received else NO_ACTIVITY,
        )

    def _step_limits(self) -> StepLimits:
        return StepLimits(
            self.grace_s,
            self.slower_than_expected,
            self.early_steps,
            self.first_of_epoch_s,
            self.first_step_s,
            self.longest_times,
            self.most_growth,
        )

    def _from_samples(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        last = ledger.samples[-1]
        counts_steps = last.steps is not None
        progress: Callable[[Sample], int | None] = (
            (lambda s: s.steps) if counts_steps else (lambda s: s.generation_tokens)
        )
        reached = progress(last)
        if not last.running or reached is None or (not counts_steps and _counts_at_the_end(ledger)):
            return
        samples = list(ledger.samples)
        start = last_window(samples, lambda s: bool(s.running) and progress(s) == reached)
        if start is None or start == len(samples) - 1:
            return
        first = samples[start]
        age = seconds_apart(first, last)
        allowed = self._allowed_s(samples[: start + 1], settings, counts_steps=counts_steps)
        if age < allowed / 4:
            return
        sure = counts_steps and age >= settings(self.pause_s)
        quiet = not moving_pause_s(samples[: start + 1]) and age < settings(self.first_of_epoch_s)
        what = "no step has ended" if counts_steps else "no token was generated"
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if sure else "cannot-tell",
            severity="info" if quiet else None,
            pending=age < allowed or len(samples) - start < FEWEST_SAMPLES,
            since_ns=first.at_ns or 0,
            position=first.position,
            evidence=(
                Evidence("stalled_s", round(age, 1), "s", last.source),
                Evidence("allowed_s", round(allowed, 1), "s"),
                Evidence("steps", reached if counts_steps else "not exposed", "steps", last.source, first.position),
                Evidence("running", last.running, "requests", last.source, last.position),
                Evidence("waiting", "not exposed" if last.waiting is None else last.waiting, "requests", last.source),
                Evidence("samples_without_change", len(samples) - start, "samples", last.source),
            ),
            explanation=(
                f"Since {clock_time(first.at_ns or 0)} ({duration(age)}) {what}, with"
                f" {counted(last.running, 'request')} running. The metrics page still responds with unchanged"
                " values: the front end serves it, while the engine behind it completes no step."
            ),
            do_now=STALLED_DO_NOW if sure else STALLED_DO_NOW[:1],
            change=STALLED_CHANGE,
            wont_help=STALLED_WONT_HELP if sure else (),
            missing=(
                "whether a step is in flight, the engine is paused, or its requests receive no tokens"
                " (stuck.zero-token): attach the event stream (monitor doctor tcp://HOST:5757), or read the"
                " process's state (ps -o stat= -p PID)"
                + (
                    ""
                    if sure
                    else f". For {duration(settings(self.pause_s))} a pause for new weights, a profile, a"
                    " compilation or one long prefill looks the same"
                )
                if counts_steps
                else "the count of steps (vllm:iteration_tokens_total_count): a long prefill generates no token either"
            ),
        )

    def _allowed_s(self, before: Sequence[Sample], settings: Settings, *, counts_steps: bool) -> float:
        """Return how long the count may stand still, by the steps and the scrapes seen before."""
        longest = settings(self.longest_times) * moving_pause_s(before)
        scrapes = settings(self.least_scrapes) * scrape_interval_s(before)
        seen_enough = bool(longest) and counts_steps
        return max(settings(self.grace_s if seen_enough else self.first_step_s), longest, scrapes)


def _halt(
    ledger: EngineLedger, running: list[RequestState], waiting: list[RequestState], is_received: bool
) -> tuple[StepInFlight | None, int, str] | None:
    """Return the step in flight, if any, since when (monotonic) nothing moves, and the evidence, or None if the engine
    has a reason not to step.
    """
    step = min(steps_in_flight(ledger), key=lambda s: s.since_ns, default=None)
    if step is not None:
        # A heartbeat may overtake the events of the step that ended before this one, or they are lost.
        lost_ns = ledger.losses[-1].at_ns - ledger.wall(1) + 1 if ledger.losses else 0
        since = max(step.since_ns, ledger.step_times.completed_ns, ledger.beats.other_step_ns, lost_ns)
        tokens = f" ({counted(step.tokens, 'token')})" if step.tokens else ""
        return step, since, f"step {step.step}{tokens} was launched and has not completed"
    if ledger.state.mode:
        return None  # its operator has paused it, or put it to sleep
    if is_received and (ledger.beats.passes_advanced or not ledger.beats.count):
        return None  # the scheduler makes passes and finds nothing to run, or this reader came too late to know
    if is_received and not running and all(is_outside(record) for record in waiting):
        return None  # what they wait for wakes it
    if is_received and ledger.description.engine == "vllm" and not ledger.description.reports_modes:
        return None  # a recording of an earlier probe: the engine may be paused
    # A heartbeat may overtake the events of a step's end: until the one before it the step was in flight.
    since = max(ledger.state.now_ns, _last_progress(running), ledger.looked_ns, ledger.beats.other_step_ns)
    return None, since, "no step was launched though there is work"


def _expectation_text(allowance: StepAllowance | None) -> str:
    if allowance is None:
        return ""
    if allowance.unseen:
        return f" Its expected duration is unknown: {allowance.unseen}. It may be a slow step or a compilation."
    return f" Judging by earlier steps, it should take {duration(allowance.expected_s)}."


def _expectation_evidence(allowance: StepAllowance | None, since_at: str) -> tuple[Evidence, ...]:
    if allowance is None:
        return ()
    expected = "not known" if allowance.unseen else round(allowance.expected_s, 3)
    return (
        Evidence("expected_step_s", expected, "s", position=since_at),
        Evidence("longest_step_s", round(allowance.longest_s, 3), "s", position=since_at),
    )


def _stall_evidence(
    ledger: EngineLedger, living: Living, step: StepInFlight | None, age: float, allowed: float, since_at: str
) -> tuple[Evidence, ...]:
    state, at, running, waiting = ledger.state, ledger.at, living.running, living.waiting
    silent_s = (ledger.now_ns - ledger.last_received_ns) / 1e9
    return (
        Evidence("stalled_s", round(age, 1), "s", position=since_at),
        Evidence("allowed_s", round(allowed, 1), "s", position=at(state.places.started)),
        Evidence("silent_s", round(silent_s, 1), "s", position=str(ledger.last_received_at)),
        Evidence(
            "step_in_flight",
            step.step if step else "none",
            "step",
            position=at(step.at if step else state.places.completed),
        ),
        Evidence(
            "tokens_in_flight",
            step.tokens if step else 0,
            "tokens",
            position=at(step.at if step else state.places.completed),
        ),
        Evidence("last_step", state.last_step, "step", position=at(state.places.completed)),
        Evidence("running", len(running), "requests", position=at(state.places.moved)),
        Evidence("waiting", len(waiting), "requests", position=at(state.places.moved)),
        Evidence(
            "engine_watchdog",
            watchdog_report((*running, *waiting)),
            position=at(*(r.stalled_at for r in (*running, *waiting) if r.stalled_ns)),
        ),
    )
