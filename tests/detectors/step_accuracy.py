"""How well the model of step times fits engines of 1 ms to 30 s a step, and how soon a hang is found in them.

python -m tests.detectors.step_accuracy prints a table. Each engine is drawn: its fixed cost
log-uniformly, what tokens, context and attention add, and jitter. The monitor sees its events alone.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvscope.monitor.ledger.durations import StepWork
from tests.detectors.test_step_time import StepCost, Timed, mixed_steps

SEED: Final = 1807
ENGINES: Final = 40
STEPS_SEEN: Final = 120
STEP_RANGE_S: Final = (1e-3, 30.0)
LONGEST_STEP_S: Final = 60.0
LOOKS_EVERY_S: Final = 0.5
"""How often the monitor judges: what it finds, it finds so much later."""


class StepAccuracy(NamedTuple):
    """One engine: the fixed cost, false stalls, the model's errors as shares of the true times, and for a hang after
    STEPS_SEEN steps, and one within the first 50, the step's true time and how long the monitor took.
    """

    fixed_s: float
    jitter: float
    false_stalls: int
    errors: list[float]
    late: tuple[float, float]
    early: tuple[float, float]
    early_verdict: str

    @property
    def in_time(self) -> bool:
        """Whether both hangs were found in time: 5 s or three steps, and before 50 steps a minute or three steps."""
        (late_s, late_found), (early_s, early_found) = self.late, self.early
        return late_found <= max(5.0, 3 * late_s) + LOOKS_EVERY_S and early_found <= max(60.0, 3 * early_s) + 1


def drawn_cost(rng: random.Random) -> StepCost:
    """Draw an engine: what work adds is a tenth of the fixed cost to 300 times it, up to the longest step."""
    fixed = math.exp(rng.uniform(*map(math.log, STEP_RANGE_S)))
    rest = min(LONGEST_STEP_S, fixed * 10 ** rng.uniform(-1, 2.5))
    shares = [rng.random() for _ in range(3)]
    token, context, pair = (rest * share / sum(shares) for share in shares)
    jitter = 10 ** rng.uniform(-2, math.log10(0.2))
    return StepCost(fixed, token / 8192, context / 100_000, pair / (8192 * 24_000), jitter)


def measure_engine(cost: StepCost, seed: int) -> StepAccuracy:
    """Run one engine to a hang, and another of its kind to an early one."""
    scene = Timed(cost, seed)
    steps, errors, false_stalls = mixed_steps(scene, STEPS_SEEN + 1), [], 0
    for count in range(STEPS_SEEN):
        tokens = next(steps)
        work = [(number_of, scene.computed[number]) for number, number_of in tokens.items()]
        model = scene.ledger.step_model()
        scene.run(tokens)
        if count >= STEPS_SEEN // 2 and model is not None:
            true_s = cost._replace(jitter=0.0).seconds(work, scene.rng)
            errors.append(abs(model.expected_s(_step_work(work)) / true_s - 1))
    false_stalls += not scene.never_alarmed()
    late_s = scene.launch(next(steps))
    late = late_s, scene.found_after(3 * late_s + 120)
    again = Timed(cost, seed + 1)
    steps = mixed_steps(again, 40)
    longest = max(again.run(next(steps)) for _ in range(20))
    false_stalls += not again.never_alarmed()
    again.launch({min(again.computed): 1})
    early = longest, again.found_after(5 * longest + 120)
    verdict = again.firing("stuck.engine-stalled")[0].verdict
    return StepAccuracy(cost.fixed, cost.jitter, false_stalls, errors, late, early, verdict)


def _step_work(work: list[tuple[int, int]]) -> StepWork:
    context = sum(before + count for count, before in work)
    pairs = sum(count * (before + count // 2) for count, before in work if count > 1)
    return StepWork(sum(count for count, _ in work), context, pairs)


def measured(count: int = ENGINES, seed: int = SEED) -> Iterator[StepAccuracy]:
    """Yield `count` drawn engines."""
    rng = random.Random(seed)
    for number in range(count):
        yield measure_engine(drawn_cost(rng), seed + number)


def accuracy_table(found: list[StepAccuracy]) -> str:
    """Return the table as Markdown."""
    errors = sorted(error for one in found for error in one.errors)
    p50, p95 = errors[len(errors) // 2], errors[len(errors) * 95 // 100]
    late = sorted(one.late[1] / max(one.late[0], 1e-9) for one in found if one.late[0] > 2)
    return f"""{len(found)} engines drawn with seed {SEED}: fixed cost {STEP_RANGE_S[0] * 1000:g} ms to
{STEP_RANGE_S[1]:g} s, log-uniform, steps up to {LONGEST_STEP_S:g} s longer by tokens, context and attention,
jitter 1 % to 20 %.

| measure | value |
|---|---|
| error of the expected time, p50 | {100 * p50:.1f} % |
| error of the expected time, p95 | {100 * p95:.1f} % |
| steps compared | {len(errors):,} |
| engines with a false stall | {sum(bool(one.false_stalls) for one in found)} of {len(found)} |
| hangs after {STEPS_SEEN} steps found within 5 s or three steps, and after 20 within 60 s or three steps | \
{sum(one.in_time for one in found)} of {len(found)} |
| of the early ones, *likely* | {sum(one.early_verdict == "likely" for one in found)} of {len(found)} |
| hangs of steps over 2 s: time to finding over the step's time, median and longest | \
{late[len(late) // 2]:.2f}, {late[-1]:.2f} ({len(late)} engines) |
"""


if __name__ == "__main__":
    results = []
    for result in measured():
        results.append(result)
        print(f"{len(results)}: {result.fixed_s:.3g} s, in time {result.in_time}", file=sys.stderr, flush=True)
    print(accuracy_table(results), end="")
