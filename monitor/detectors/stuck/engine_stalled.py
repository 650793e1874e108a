"""stuck.engine-stalled: steps stop with work pending."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ...base.text import clock_time, counted, duration
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ...ledger.heartbeat_history import PAUSE_NS
from ...ledger.queue_state import Living, is_outside
from ...ledger.records import RequestState, StepInFlight
from ..detector import Causes, FromSamples, SampleNeed, Settings, StreamDetector, Threshold, known_of
from ..judgement import ENGINE_PAUSED, Evidence, Judgement, Unless, Verdict, began_later, seen
from ..leak.deferred_free_stalled import DeferredFreeStalled
from ..leak.finished_held import FinishedHeld
from ..leak.remote_load_lost import RemoteLoadLost
from ..runbook_files import FindingFields
from ..sample_math import FEWEST_SAMPLES, is_made_anew, last_window, moving_pause_s, scrape_interval_s, seconds_apart
from ..shared_thresholds import LEAST_SCRAPES, LONGEST_TIMES
from .front_end import FrontEndLoss
from .grammar_wait import GrammarWait
from .lost_wakeup import LostWakeup
from .promotion_starved import PromotionStarved
from .remote_load import RemoteLoad
from .step_expectation import (
    AFTER_S,
    StepAllowance,
    StepLimits,
    last_step_ns,
    stack_evidence,
    stack_text,
    step_allowance,
)
from .waiting_requests import watchdog_report
from .zero_token import ZeroToken

NOTHING_MOVES: Final = (
    Causes[Judgement]()
    .of(FrontEndLoss, began_later)
    .of(RemoteLoad, began_later)
    .of(LostWakeup, began_later)
    .of(GrammarWait, began_later)
    .of(PromotionStarved, began_later)
    .of(ZeroToken, began_later)
    .of(FinishedHeld, began_later)
    .of(RemoteLoadLost, began_later)
    .of(DeferredFreeStalled, began_later)
)
"""Effects of a step that does not end."""


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


class EngineStalled(StreamDetector[Judgement]):
    """An engine whose steps have stopped with work pending.

    Sees: a step that was launched and does not complete, or no launch although requests run or wait.
    Confirmed when: heartbeats arrive, and a model of this engine's own step times does not allow so long a step.
    Likely when: the process sends nothing, events were lost, or no earlier step was like this one.
    Not when: the operator paused the engine, its passes find nothing to run, all requests wait for something outside
    the scheduler, other ranks go on (stuck.rank-diverged), or the whole process did not run and goes on now.
    """

    code = "stuck.engine-stalled"
    severity = "critical"
    title = "Steps have stopped with work pending"

    text_least_s = Threshold(
        20, "s", "two of vLLM's intervals without a token, where lines before show short steps, or a person complains"
    )
    text_unknown_s = Threshold(
        60, "s", "where no line shows how long a step takes here, a slow engine pauses for so long, too"
    )
    text_times_longest = Threshold(
        2, "times", "a pause that was as long before and ended shows how long a step may take here"
    )
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
        300, "s", "the first step of a large model may compile for minutes. Until then, a stall in it is information"
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
    busy_cores = Threshold(
        0.5,
        "cores",
        "a step keeps a thread of its process busy, a whole core, while an answer to a scrape costs 10 to 60 ms",
    )
    sample_need = SampleNeed(6, pause_s, "requests run, and neither steps nor tokens nor usage move")
    alternatives = (
        ENGINE_PAUSED,
        Unless("a slow but sound step", "the model of this engine's own step times"),
        Unless("a reader that is late", "heartbeats that show the step in flight"),
    )
    causes = NOTHING_MOVES

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the stall, unless other ranks go on."""
        stall = self.stall(ledger, settings)
        if stall is not None and not ranks_going_on(ledger, stall, settings):
            yield self.finding(ledger, **stall)

    def stall(self, ledger: EngineLedger, settings: Settings) -> FindingFields | None:
        """Return the stall of the engine, whatever its server's other ranks do."""
        living = ledger.living()
        state, at = ledger.state, ledger.at
        # A request in no queue is no work for the scheduler: it is stuck.lost-request.
        running = [record for record in living.running if not record.not_queued_ns]
        waiting = [record for record in living.waiting if not record.not_queued_ns]
        if state.stopped_ns or not (running or waiting or steps_in_flight(ledger)):
            return None
        silent_s = (ledger.now_ns - ledger.last_received_ns) / 1e9
        is_received = silent_s < PAUSE_NS / 1e9
        halt = _halt(ledger, running, waiting, is_received)
        if halt is None:
            return None
        step, since, what = halt
        grace = settings(self.grace_s)
        since_at = at(step.at) if step else at(state.places.completed, state.places.moved)
        age = ledger.age_s(since) - ledger.beats.paused_s(since)
        if not is_received:
            age = max(age if step else 0.0, silent_s)
        if age < grace / 2:
            return None
        allowance = step_allowance(ledger, settings, self._step_limits(), step) if step is not None else None
        allowed = allowance.allowed_s if allowance is not None else grace
        if age < allowed / 2:
            return None
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
        return FindingFields(
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
                f" {counted(len(running), 'request')} running and {len(waiting):,}"
                f" waiting.{_expectation_text(allowance)} {alive}{stack_text(state, since)}"
            ),
            case="If the step may compile" if allowance and allowance.unseen else "",
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


def _progress(sample: Sample) -> tuple[object, ...]:
    """Return what moves while an engine works. In a prefill by chunks that is usage alone, until its first token."""
    return sample.steps, sample.usage, sample.prompt_tokens, sample.generation_tokens


def _needed(sample: Sample) -> dict[str, object]:
    """Return the values without which a stall is not likely, by the metric that has them."""
    return {
        "the count of steps (vllm:iteration_tokens_total_count)": sample.steps,
        "the pool's usage (vllm:kv_cache_usage_perc)": sample.usage,
        "prompt tokens (vllm:prompt_tokens_total)": sample.prompt_tokens,
        "the server's CPU time (process_cpu_seconds_total)": sample.process_cpu_s,
    }


class PageServer(NamedTuple):
    """What the process that serves the page did while its values stood still.

    cpu_s: the CPU time that it took, None where that is not exposed. is_busy: it computes. is_copy: it did not even
    answer.
    """

    cpu_s: float | None
    is_busy: bool
    is_copy: bool

    @classmethod
    def between(cls, first: Sample, last: Sample, busy_cores: float) -> PageServer:
        """Compare two samples. CPU time that went back is another process's."""
        if first.process_cpu_s is None or last.process_cpu_s is None or last.process_cpu_s < first.process_cpu_s:
            return cls(None, is_busy=False, is_copy=False)
        cpu_s = last.process_cpu_s - first.process_cpu_s
        return cls(cpu_s, is_busy=cpu_s > busy_cores * seconds_apart(first, last), is_copy=cpu_s == 0)

    @property
    def doubt(self) -> str:
        """What is missing where it is busy, or has not answered."""
        if self.is_busy:
            return "what it computes (py-spy dump --pid PID): a step of minutes looks the same"
        return "whether the page is a copy that is made again now and then: scrape the engine itself"

    @property
    def text(self) -> str:
        """A sentence about it."""
        if self.cpu_s is None:
            return (
                "The page still responds, with unchanged values: the front end may serve it while the engine behind it"
                " completes no step, or it is a copy that is not made again."
            )
        if self.is_busy:
            return f"The process that serves the page took {duration(self.cpu_s)} of CPU time meanwhile: it computes."
        if self.is_copy:
            return (
                "The page is the same at each scrape, CPU time of its server included: the server stands still as well"
                " and something before it responds, or what responds has not been made again."
            )
        return (
            "The metrics page still responds, at next to no CPU time: the front end serves it, while the engine behind"
            " it completes no step."
        )

    def evidence(self, last: Sample) -> Evidence:
        """Its CPU time."""
        value = "not exposed" if self.cpu_s is None else round(self.cpu_s, 2)
        return Evidence("server_cpu_s", value, "s", last.source, last.position)


def _missing_signal(doubts: Sequence[str], pause_s: float, *, sure: bool) -> str:
    """Return the signal that would decide it."""
    stream = (
        "whether a step is in flight, the engine is paused, or its requests receive no tokens (stuck.zero-token):"
        " attach the event stream (monitor doctor tcp://HOST:5757), or read the process's state (ps -o stat= -p PID)"
    )
    pause = (
        ()
        if sure
        else (
            f"For {duration(pause_s)} a pause for new weights, a profile, a compilation or one long prefill looks the"
            " same",
        )
    )
    return ". ".join(("; ".join((*doubts, stream)), *pause))


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
        seen("expected_step_s", expected, "s", since_at),
        seen("longest_step_s", round(allowance.longest_s, 3), "s", since_at),
    )


def _stall_evidence(
    ledger: EngineLedger, living: Living, step: StepInFlight | None, age: float, allowed: float, since_at: str
) -> tuple[Evidence, ...]:
    state, at, running, waiting = ledger.state, ledger.at, living.running, living.waiting
    silent_s = (ledger.now_ns - ledger.last_received_ns) / 1e9
    return (
        seen("stalled_s", round(age, 1), "s", since_at),
        seen("allowed_s", round(allowed, 1), "s", at(state.places.started)),
        seen("silent_s", round(silent_s, 1), "s", str(ledger.last_received_at)),
        seen("step_in_flight", step.step if step else "none", "step", at(step.at if step else state.places.completed)),
        seen("tokens_in_flight", step.tokens if step else 0, "tokens", at(step.at if step else state.places.completed)),
        seen("last_step", state.last_step, "step", at(state.places.completed)),
        seen("running", len(running), "requests", at(state.places.moved)),
        seen("waiting", len(waiting), "requests", at(state.places.moved)),
        seen(
            "engine_watchdog",
            watchdog_report((*running, *waiting)),
            at=at(*(r.stalled_at for r in (*running, *waiting) if r.stalled_ns)),
        ),
    )


class EngineStalledFromSamples(FromSamples, EngineStalled):
    """An engine whose metrics stand still.

    Sees: steps, tokens and usage that do not change from sample to sample while requests run.
    Likely when: for a minute, on a page that exposes all of them and whose server does not compute.
    Cannot tell: a value is not exposed or the server computes: a long step, a compilation or new weights look the same.
    Not when: the engine sleeps, or other ranks go on (stuck.rank-diverged).
    """

    def stall(self, ledger: EngineLedger, settings: Settings) -> FindingFields | None:
        """Return the stall that the samples show."""
        last = ledger.samples[-1]
        counts_steps = last.steps is not None
        reached = last.steps if counts_steps else last.generation_tokens
        if not last.running or last.awake is False or reached is None:
            return None
        if not counts_steps and _counts_at_the_end(ledger):
            return None
        samples = ledger.samples
        start = last_window(samples, lambda s: bool(s.running) and _progress(s) == _progress(last))
        if start is None or start == len(samples) - 1:
            return None
        first, seen = samples[start], samples[: start + 1]
        age = seconds_apart(first, last)
        paused_s = moving_pause_s(seen, _progress, may_be_copy=not is_made_anew(samples[start:]))
        allowed = self._allowed_s(seen, paused_s, settings, counts_steps=counts_steps)
        if age < allowed / 4:
            return None
        server = PageServer.between(first, last, settings(self.busy_cores))
        was_seen_to_move = bool(paused_s)
        absent = [metric for metric, value in _needed(last).items() if value is None]
        doubts = [
            *(f"{metric}, which this page does not expose" for metric in absent),
            *([server.doubt] if server.is_busy or (server.is_copy and not was_seen_to_move) else []),
        ]
        sure = not doubts and age >= settings(self.pause_s)
        quiet = (not was_seen_to_move or server.is_busy) and age < settings(self.first_of_epoch_s)
        what = "no step has ended" if counts_steps else "no token was generated"
        return FindingFields(
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
                server.evidence(last),
            ),
            explanation=(
                f"Since {clock_time(first.at_ns or 0)} ({duration(age)}) {what}, with"
                f" {counted(last.running, 'request')} running, and neither usage nor a count of tokens has changed."
                f" {server.text}"
            ),
            case="" if sure else "From metrics, where a pause looks the same",
            missing=_missing_signal(doubts, settings(self.pause_s), sure=sure),
        )

    def _allowed_s(self, before: Sequence[Sample], paused_s: float, settings: Settings, *, counts_steps: bool) -> float:
        """Return how long everything may stand still, by the pauses and the scrapes seen before."""
        longest = settings(self.longest_times) * paused_s
        scrapes = settings(self.least_scrapes) * scrape_interval_s(before)
        seen_enough = bool(longest) and counts_steps
        return max(settings(self.grace_s if seen_enough else self.first_step_s), longest, scrapes)


def stall_of(ledger: EngineLedger, settings: Settings) -> FindingFields | None:
    """Return the stall of an engine, by its event stream or else by its samples."""
    detector = EngineStalled() if ledger.has_stream else EngineStalledFromSamples()
    return detector.stall(ledger, settings) if detector.applies(known_of(ledger)) else None


def ranks_going_on(ledger: EngineLedger, stall: FindingFields, settings: Settings) -> list[EngineLedger]:
    """Return the ranks that launched a step well after the stall began, and do not stand still themselves."""
    if not stall["since_ns"]:
        return []
    from_ns = stall["since_ns"] + settings(AFTER_S) * 1e9
    ahead = [other for other in ledger.siblings if last_step_ns(other) > from_ns]
    stalls = [stall_of(other, settings) for other in ahead]
    return [other for other, its in zip(ahead, stalls, strict=True) if its is None or its["pending"]]
