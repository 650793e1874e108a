"""How long a step in flight may take before it counts as stopped, and where the engine's thread stands meanwhile.

The data-parallel ranks of a server show when each last made a step. A stack shows the rest, as far as it was read.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final, NamedTuple

from ...contract.kinds import Layer
from ...ledger.engine_ledger import EngineLedger
from ...ledger.engine_state import EngineState
from ...ledger.records import EngineStack, StepInFlight
from ..detector import Settings, Threshold
from ..judgement import Evidence, seen

AFTER_S: Final = Threshold(
    2,
    "s",
    "ranks that wait for one another stop within a step of each other. A rank that steps on for longer does not wait",
)
"""A threshold of stuck.rank-diverged. Below it every rank that stands still is stuck.engine-stalled."""


def last_step_ns(ledger: EngineLedger) -> int:
    """Return when it last launched a step, or its metrics showed the end of one, or 0 if that is not known."""
    if ledger.has_stream:
        return ledger.wall(ledger.state.launched_ns)
    moved = [later.at_ns or 0 for earlier, later in pairwise(ledger.samples) if later.steps != earlier.steps]
    return moved[-1] if moved else 0


JITTER_SIGMAS: Final = 3.4
"""Steps of one kind differ. The logarithm of 1 step in 3,000 lies this many standard deviations above the mean, and a
step must be `slower_than_expected` times as slow as that one.
"""
MODEL_SIGMAS: Final = 3
"""Standard errors of the model's expectation that are allowed beside it."""
NO_STEP_YET: Final = "no step of this epoch has completed, and the first may load, compile or capture"
NONE_RECEIVED: Final = "no step has completed since its events are received"
"""The reason for a reader that attached to an engine that had made steps: it has compiled before."""


class StepAllowance(NamedTuple):
    """How long a step may take, in seconds, and by what: `expected_s` is 0 where no step like it was seen."""

    allowed_s: float
    expected_s: float
    unseen: str
    """Why the engine's own steps do not show how long this one takes, or empty if they do."""
    longest_s: float
    """The longest step of the epoch seen so far."""
    information_s: float = 0.0
    """A stall that is younger than this is information: most engines that look like it compile."""


class StepLimits(NamedTuple):
    """The thresholds of stuck.engine-stalled that concern steps."""

    grace: Threshold
    slower_than_expected: Threshold
    early_steps: Threshold
    first_of_epoch: Threshold
    unseen_step: Threshold
    longest_times: Threshold
    most_growth: Threshold


def step_allowance(ledger: EngineLedger, settings: Settings, limits: StepLimits, step: StepInFlight) -> StepAllowance:
    """Return how long `step` may take, by the steps of this epoch that computed something alike."""
    times, model = ledger.step_times, ledger.step_model()
    work = times.work_of(step.step)
    if work is None and not step.tokens and not ledger.state.damaged:
        work = times.last_work  # a larger step would have been handed over before it runs
    if not times.count:
        first = ledger.state.last_step < 0
        information_s = settings(limits.first_of_epoch) if first else 0.0
        unseen = NO_STEP_YET if first else NONE_RECEIVED
        return StepAllowance(settings(limits.unseen_step), 0.0, unseen, 0.0, information_s)
    unseen = ""
    if model is None or times.count < settings(limits.early_steps):
        unseen = f"it is among the first {settings(limits.early_steps):.0f} steps received, which may compile kernels"
    elif work is None:
        unseen = "its launch event was not received"
    elif not model.has_seen_like(work):
        unseen = "no step seen so far computed as much"
    if unseen or work is None or model is None:
        larger = work is not None and model is not None and not model.has_seen_like(work)
        growth = min(model.growth(work), settings(limits.most_growth)) if larger and model and work else 1.0
        longest = settings(limits.longest_times) * growth * times.longest_s
        return StepAllowance(max(settings(limits.unseen_step), longest), 0.0, unseen, times.longest_s)
    expected = model.expected_s(work)
    slow = settings(limits.slower_than_expected) * math.exp(JITTER_SIGMAS * model.jitter)
    allowed = slow * expected + MODEL_SIGMAS * model.uncertainty_s(work)
    return StepAllowance(max(settings(limits.grace), allowed), expected, "", times.longest_s)


SHOWN_FRAMES: Final = 8
LAYER_TEXT: Final = {
    Layer.SCHEDULER: "the scheduler",
    Layer.EXECUTOR: "the executor, waiting for its workers",
    Layer.MODEL: "the model",
    Layer.CONNECTOR: "the KV connector",
    Layer.GRAMMAR: "the grammar's compiler",
    Layer.SAMPLER: "the sampler",
}


def stack_evidence(ledger: EngineLedger, since_ns: int) -> tuple[Evidence, ...]:
    """Return the layer and the innermost frames, if the stack was read since then (monotonic)."""
    stack = _stack_since(ledger.state, since_ns)
    if stack is None:
        return ()
    position = ledger.at(stack.at)
    frames = stack.frames.splitlines()
    calls = [line for line in frames if not line.startswith("process ")][:SHOWN_FRAMES]
    processes = [line for line in frames if line.startswith("process ")][:SHOWN_FRAMES]
    return (
        seen("stalled_layer", _layer(stack).name, "", position),
        *(seen("stack_frame", line, "", position) for line in calls),
        *(seen("worker_process_state", line, "", position) for line in processes),
    )


def stack_text(state: EngineState, since_ns: int) -> str:
    """Return a sentence with the layer and the innermost call, or an empty one if the stack was not read since then."""
    stack = _stack_since(state, since_ns)
    if stack is None or not stack.frames:
        return ""
    innermost = stack.frames.splitlines()[0]
    where = LAYER_TEXT.get(_layer(stack), "")
    return f" The engine's thread is in {where}, in {innermost}." if where else f" It is in {innermost}."


def _stack_since(state: EngineState, since_ns: int) -> EngineStack | None:
    stack = state.stack
    return stack if stack is not None and stack.at_ns >= since_ns else None


def _layer(stack: EngineStack) -> Layer:
    try:
        return Layer(stack.layer)
    except ValueError:
        return Layer.UNKNOWN
