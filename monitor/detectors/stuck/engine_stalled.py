"""stuck.engine-stalled: steps stop with work pending. Needs steps and heartbeats; silence alone is only likely.

A request that waits for something outside the scheduler is no work: an engine that has no other may sleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvscope.monitor.detectors.judgement import Evidence, Judgement, Verdict
from kvscope.monitor.detectors.stuck.waiting_requests import HEARTBEAT_S, Living, is_outside, watchdog
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.state.records import RequestState, StepInFlight
from kvscope.monitor.text import clock_time, counted, duration

ENGINE_STALLED = "stuck.engine-stalled"
DO_NOW: Final = (
    "Dump the process's stacks before anything else (py-spy dump --pid PID): they name the call that hangs.",
    "Take the engine out of rotation: its /health may still answer 200. Then restart it.",
)
CHANGE: Final = ("Let the load balancer probe progress (kvscope's /metrics, or a one-token request), not /health.",)
WONT_HELP: Final = ("Waiting for the queue to drain, or lowering the load: nothing runs.",)


def judge(ledger: EngineLedger, settings: Settings, living: Living) -> Iterator[Judgement]:
    """Whether the whole engine stands still."""
    state, at, running, waiting = ledger.state, ledger.at, living.running, living.waiting
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
    elif heard and not running and all(is_outside(record) for record in waiting):
        return  # what they wait for will wake it
    else:
        allowed = grace
        since = max(state.now_ns, _last_progress(running))
        what = "no step was launched though there is work"
    since_at = at(step.at) if step else at(state.places.completed, state.places.moved)
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
        position=since_at,
        requests=tuple(record.id for record in (*running, *waiting)),
        evidence=(
            Evidence("stalled_s", round(age, 1), "s", position=since_at),
            Evidence("allowed_s", round(allowed, 1), "s", position=at(state.places.started)),
            Evidence("silent_s", round(silent_s, 1), "s", position=str(ledger.heard_at)),
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
                watchdog((*running, *waiting)),
                position=at(*(r.stalled_at for r in (*running, *waiting) if r.stalled_ns)),
            ),
        ),
        explanation=(
            f"Since {clock_time(ledger.wall(since))} ({duration(age)}) {what}, with {counted(len(running), 'request')}"
            f" running and {len(waiting):,} waiting. {alive}"
        ),
        do_now=DO_NOW,
        change=CHANGE,
        wont_help=WONT_HELP,
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
