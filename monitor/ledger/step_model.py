"""How long an engine's steps take: a model of the step time, fitted to the engine's own recent steps.

    seconds = fixed + per_token * tokens + per_context_token * context + per_pair * pairs

The terms follow from how a transformer computes a step: reading the weights costs the same whatever the batch, linear
layers cost by the token, decoding reads the KV of each request's context, and a prompt's attention costs by pairs of
query and key. All coefficients are at least 0. Jitter is proportional to the step, so errors are relative, and a few
slow steps (a compilation, a swapped page) do not move the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Final

from kvscope.monitor.state.step_times import LEAST_SECONDS, StepWork

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
