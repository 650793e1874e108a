"""How long recent steps took, with a model of the step time fitted to them, and recent waits for something outside the
scheduler: KV transfers and grammars.

    seconds = fixed + a * tokens + b * context + c * pairs

The terms follow from how a transformer computes a step: reading the weights costs the same whatever the batch, linear
layers cost by the token, decoding reads the KV of each request's context, and a prompt's attention costs by pairs of
query and key. All coefficients are at least 0. Jitter is proportional to the step, so errors are relative, and a few
slow steps (a compilation, a swapped page) do not move the fit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, combinations
from typing import Final, NamedTuple

from .records import RequestState

MAX_STEPS_OF_A_KIND: Final = 128
MAX_IN_FLIGHT: Final = 64
MAX_PROMPT_REACHES: Final = 4096
LEAST_SECONDS: Final = 1e-5


class StepWork(NamedTuple):
    """The work of a step. `context`: KV tokens of its requests. `pairs`: of new tokens and context, of prompts."""

    tokens: int
    context: int
    pairs: int

    @property
    def terms(self) -> tuple[float, float, float, float]:
        """The model's terms."""
        return 1.0, float(self.tokens), float(self.context), float(self.pairs)


class PromptReach(NamedTuple):
    """How far the launched steps compute a request, from a chunk of its prompt on.

    A probe reports now and then how far requests are, and not after each step. preemptions: of the request, then.
    """

    preemptions: int
    chunk_end: int
    reached: int


class StepTimes:
    """The recent steps of one epoch, and the steps in flight.

    A step runs from its launch or from the end of the step before it, whichever is later: an engine that schedules
    ahead launches it while the other still runs.
    """

    def __init__(self) -> None:
        self.count = 0
        """Steps seen from launch to end."""
        self.longest_s = 0.0
        self.completed_ns = 0
        """When a step last completed, on the engine's monotonic clock."""
        self.last_work: StepWork | None = None
        """The work of the step whose launch was received last."""
        self._in_flight: dict[int, tuple[int, StepWork, dict[int, int]]] = {}
        """By step: when it was launched, its work, and its tokens of each request."""
        self._prompts: dict[int, PromptReach] = {}
        """By request, until it is reported that the chunk is computed."""
        self._decode: deque[tuple[StepWork, float]] = deque(maxlen=MAX_STEPS_OF_A_KIND)
        self._prefill: deque[tuple[StepWork, float]] = deque(maxlen=MAX_STEPS_OF_A_KIND)

    def launch(
        self, step: int, at_ns: int, ids: list[int], tokens: list[int], requests: Mapping[int, RequestState]
    ) -> None:
        """Note a step that computes `tokens` of the requests `ids`."""
        context = pairs = 0
        ahead = [tokens_of for _, _, tokens_of in self._in_flight.values()]
        for number, count in zip(ids, tokens, strict=False):
            record = requests.get(number)
            computed = record.computed_tokens if record is not None else 0
            for tokens_of in ahead:  # an engine that schedules ahead has not computed these yet
                computed += tokens_of.get(number, 0)
            if record is not None and (count > 1 or number in self._prompts):
                computed = self._reached(record, computed, count)
            context += computed + count
            if count > 1:
                pairs += count * (computed + count // 2)
        if len(self._in_flight) >= MAX_IN_FLIGHT:  # their ends were lost
            self._in_flight.clear()
        if len(self._prompts) > MAX_PROMPT_REACHES:
            self._prompts = {number: known for number, known in self._prompts.items() if number in requests}
        self.last_work = StepWork(sum(tokens), context, pairs)
        self._in_flight[step] = at_ns, self.last_work, dict(zip(ids, tokens, strict=False))

    def _reached(self, record: RequestState, computed: int, count: int) -> int:
        """Return the tokens that precede the `count` new ones, at least as many as the state knows, `computed`."""
        known = self._prompts.pop(record.number, None)
        if known is not None and known.preemptions == record.preemptions and record.computed_tokens < known.chunk_end:
            computed = max(computed, known.reached)
        else:
            known = None
        if count > 1 and computed + 1 < record.prompt_tokens + record.output_tokens:  # not drafts after its last token
            known = PromptReach(record.preemptions, computed + count, 0)
        if known is not None:
            self._prompts[record.number] = known._replace(reached=computed + count)
        return computed

    def complete(self, step: int, at_ns: int) -> None:
        """Note the end of a step."""
        launched = self._in_flight.pop(step, None)
        if launched is not None:
            launched_ns, work, _ = launched
            seconds = max((at_ns - max(launched_ns, self.completed_ns)) / 1e9, LEAST_SECONDS)
            (self._prefill if work.pairs else self._decode).append((work, seconds))
            self.count += 1
            self.longest_s = max(self.longest_s, seconds)
        self.completed_ns = at_ns

    def work_of(self, step: int) -> StepWork | None:
        """Return the work of a step in flight, or None if its launch was not seen."""
        launched = self._in_flight.get(step)
        return launched[1] if launched is not None else None

    @property
    def steps(self) -> list[tuple[StepWork, float]]:
        """The recent steps and their seconds, steps with and without a prompt in equal number where there are both."""
        return [*self._decode, *self._prefill]


MAX_WAITS_KEPT: Final = 128
ANOTHER_KIND: Final = 3
"""A wait that took so many times as long as another, in proportion to its size, is of another kind."""


class OutsideWait(NamedTuple):
    """A wait that ended, on the engine's monotonic clock. `blocks`: the blocks transferred, 0 for a grammar."""

    began_ns: int
    ended_ns: int
    blocks: int
    id: str = ""
    """The request, of a transfer to another engine."""

    @property
    def took_ns(self) -> int:
        """Return how long it took."""
        return self.ended_ns - self.began_ns

    def shows(self, other: OutsideWait) -> bool:
        """Return whether this wait makes it plausible that one of the other's size took as long as the other did."""
        return ANOTHER_KIND * self.took_ns * max(1.0, other.blocks / max(self.blocks, 1)) >= other.took_ns


class WaitHistory:
    """The recent waits of one kind that ended."""

    def __init__(self) -> None:
        self.ended: deque[OutsideWait] = deque(maxlen=MAX_WAITS_KEPT)

    def note(self, began_ns: int, ended_ns: int, blocks: int = 0, name: str = "") -> None:
        """Add a wait that has ended."""
        self.ended.append(OutsideWait(began_ns, ended_ns, blocks, name))

    def longest_s(self, blocks: int = 0) -> float:
        """Return the longest time of a wait for so many blocks, scaled up if none was as large, or 0 without any."""
        longest_ns, largest = self._most()
        return longest_ns / 1e9 * max(1.0, blocks / max(largest, 1))

    def still_since_ns(self, began_ns: int) -> int:
        """Return when a wait that began at `began_ns` last showed a sign of progress.

        While others that began before it end, it may stand behind them. One that began later and has ended shows that
        it does not.
        """
        if any(wait.began_ns > began_ns for wait in self.ended):
            return began_ns
        return max(began_ns, max((wait.ended_ns for wait in self.ended), default=0))

    def _most(self) -> tuple[int, int]:
        """Return the longest time and the most blocks of any wait."""
        return _most_of(self.ended)


def _most_of(waits: Collection[OutsideWait]) -> tuple[int, int]:
    return max((wait.took_ns for wait in waits), default=0), max((wait.blocks for wait in waits), default=0)


class SendHistory(WaitHistory):
    """The recent transfers that ended. Those that took far longer than all others were not usual: they hung, or the
    engine did not ask. They count once another like them, begun after one had ended, has ended too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._usual: tuple[int, int] | None = None

    def note(self, began_ns: int, ended_ns: int, blocks: int = 0, name: str = "") -> None:
        """Add one that has ended."""
        super().note(began_ns, ended_ns, blocks, name)
        self._usual = None

    def _most(self) -> tuple[int, int]:
        if self._usual is None:
            self._usual = _most_of(self._usual_ones())
        return self._usual

    def _usual_ones(self) -> Collection[OutsideWait]:
        for longest in sorted(self.ended, key=lambda wait: -wait.took_ns):
            alike = [wait for wait in self.ended if wait.shows(longest)]
            first_end_ns = min(wait.ended_ns for wait in alike)
            if len(alike) == len(self.ended) or any(wait.began_ns >= first_end_ns for wait in alike):
                return [wait for wait in self.ended if wait.took_ns <= longest.took_ns]
        return ()


class OutsideWaits:
    """The recent waits of one epoch: for a connector to send, to fetch or to unpin KV, and for a grammar."""

    def __init__(self) -> None:
        self.sends = SendHistory()
        self.fetches = WaitHistory()
        self.grammars = WaitHistory()
        self.pins = WaitHistory()


TERMS: Final = 4
_REWEIGHTINGS: Final = 4
_HUBER: Final = 1.345
"""The usual constant of Huber's estimator: 95 % of the efficiency of least squares if errors are Gaussian."""
_MAD_TO_SIGMA: Final = 1.4826
_LEAST_JITTER: Final = 0.01
_RIDGE: Final = 1e-6
"""A ridge for terms scaled to 1: a direction that no step shows may be a thousand times as uncertain as one step."""
_SINGULAR: Final = 1e-9
"""Of a term scaled to 1, what is left of it beside others. What is less is rounding: it always came with them."""
_LEAST_GAIN: Final = 1e-9
"""The least share of all squares that a set of terms explains more than a smaller one."""


class StepModel:
    """A fitted model. `jitter` is the standard deviation of the logarithm of measured over expected time, slow outliers
    left out.
    """

    def __init__(self, steps: Sequence[tuple[StepWork, float]]) -> None:
        self.coefficients = _fit(steps)
        self.jitter = _sigma([math.log(seconds / self.expected_s(work)) for work, seconds in steps])
        weighted = [(work.terms, self.expected_s(work) ** -2) for work, _ in steps]
        self._covariance = _covariance(weighted)
        self._most = [max(work[term] for work, _ in steps) for term in range(len(StepWork._fields))]

    def expected_s(self, work: StepWork) -> float:
        """Return the seconds that a step of such work takes."""
        return max(_dot(self.coefficients, work.terms), LEAST_SECONDS)

    def uncertainty_s(self, work: StepWork) -> float:
        """Return the standard error of the expected time: large where few steps, or steps of one kind, were seen."""
        terms = work.terms
        variance = sum(a * b * self._covariance[i][j] for i, a in enumerate(terms) for j, b in enumerate(terms))
        return max(self.jitter, _LEAST_JITTER) * math.sqrt(max(variance, 0.0))

    def has_seen_like(self, work: StepWork) -> bool:
        """Return whether no term is more than twice the largest seen: beyond, the model extrapolates."""
        return self.growth(work) <= 2

    def growth(self, work: StepWork) -> float:
        """Return how many times the largest amount seen of any term the step computes."""
        return max(amount / max(most, 1) for amount, most in zip(work, self._most, strict=True))


def _fit(steps: Sequence[tuple[StepWork, float]]) -> list[float]:
    """Fit by Huber's estimator of relative errors, with coefficients of at least 0."""
    rows = [(work.terms, seconds) for work, seconds in steps]
    weights = [1 / seconds**2 for _, seconds in rows]
    coefficients = _least_squares(rows, weights)
    for _ in range(_REWEIGHTINGS):
        expected = [max(_dot(coefficients, terms), LEAST_SECONDS) for terms, _ in rows]
        errors = [seconds / value - 1 for (_, seconds), value in zip(rows, expected, strict=True)]
        bound = _HUBER * max(_sigma(errors), _LEAST_JITTER)
        weights = [
            min(1.0, bound / max(abs(error), bound)) / value**2 for error, value in zip(errors, expected, strict=True)
        ]
        coefficients = _least_squares(rows, weights)
    return coefficients


def _sigma(errors: Sequence[float]) -> float:
    """Return the standard deviation by the median of the absolute errors."""
    return _MAD_TO_SIGMA * sorted(map(abs, errors))[len(errors) // 2]


def _least_squares(rows: Sequence[tuple[Sequence[float], float]], weights: Sequence[float]) -> list[float]:
    """Return the coefficients >= 0 of least weighted squares: of all sets of terms, that which explains most.

    Smaller sets come first, and earlier terms: where two sets explain the same, the first one stays.
    """
    gram, scale = _scaled_gram([(terms, weight) for (terms, _), weight in zip(rows, weights, strict=True)])
    seen = [i for i in range(TERMS) if scale[i]]
    moments, squares = [0.0] * TERMS, 0.0
    for (terms, seconds), weight in zip(rows, weights, strict=True):
        squares += weight * seconds**2
        for i in seen:
            moments[i] += weight * seconds * terms[i] / scale[i]
    found, explained = [0.0] * TERMS, 0.0
    for chosen in chain.from_iterable(combinations(seen, size) for size in range(1, len(seen) + 1)):
        solved = _eliminated([[*(gram[i][j] for j in chosen), moments[i]] for i in chosen])
        if not solved or min(value for (value,) in solved) < 0:
            continue
        gained = sum(value * moments[i] for i, (value,) in zip(chosen, solved, strict=True))
        if gained > explained + _LEAST_GAIN * squares:
            found, explained = [0.0] * TERMS, gained
            for i, (value,) in zip(chosen, solved, strict=True):
                found[i] = value / scale[i]
    return found


def _scaled_gram(rows: Sequence[tuple[Sequence[float], float]]) -> tuple[list[list[float]], list[float]]:
    """Return the weighted sums of products of the terms, scaled so that each term's square is 1, and their scales."""
    gram = [[sum(weight * row[i] * row[j] for row, weight in rows) for j in range(TERMS)] for i in range(TERMS)]
    scale = [math.sqrt(gram[i][i]) for i in range(TERMS)]
    return [
        [gram[i][j] / (scale[i] * scale[j]) if scale[i] and scale[j] else 0.0 for j in range(TERMS)]
        for i in range(TERMS)
    ], scale


def _covariance(rows: Sequence[tuple[Sequence[float], float]]) -> list[list[float]]:
    """Return the inverse of the weighted sum of squares of the terms, for errors of standard deviation 1.

    A term that no step had adds nothing. Terms that always came together are kept apart by a ridge.
    """
    gram, scale = _scaled_gram(rows)
    seen = [i for i in range(TERMS) if scale[i]]
    inverse = _eliminated(
        [[*(gram[i][j] + _RIDGE * (i == j) for j in seen), *(float(i == j) for j in seen)] for i in seen]
    )
    found = [[0.0] * TERMS for _ in range(TERMS)]
    for row, i in zip(inverse, seen, strict=True):
        for value, j in zip(row, seen, strict=True):
            found[i][j] = value / (scale[i] * scale[j])
    return found


def _eliminated(rows: list[list[float]]) -> list[list[float]]:
    """Return the right sides of equations whose left side is positive definite, solved. Empty if it is singular."""
    size = len(rows)
    for i in range(size):
        pivot = rows[i][i]
        if pivot < _SINGULAR:
            return []
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [value - factor * own for value, own in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
