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
from typing import Final

from kvscope.monitor.state.step_times import LEAST_SECONDS, StepWork

TERMS: Final = 4
_REWEIGHTINGS: Final = 4
_SWEEPS: Final = 100
_HUBER: Final = 1.345
"""The usual constant of Huber's estimator: 95 % of the efficiency of least squares if errors are Gaussian."""
_MAD_TO_SIGMA: Final = 1.4826
_LEAST_JITTER: Final = 0.01
_RIDGE: Final = 1e-6
"""A ridge for terms scaled to 1: a direction that no step shows may be a thousand times as uncertain as one step."""


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
    """Return the coefficients >= 0 of least weighted squares, by coordinate descent. What earlier terms explain is
    theirs.
    """
    gram = [[0.0] * TERMS for _ in range(TERMS)]
    moments = [0.0] * TERMS
    for (terms, seconds), weight in zip(rows, weights, strict=True):
        for i, term in enumerate(terms):
            weighted = weight * term
            moments[i] += weighted * seconds
            for j in range(i, TERMS):
                gram[i][j] += weighted * terms[j]
    for i in range(TERMS):
        for j in range(i):
            gram[i][j] = gram[j][i]
    found = [0.0] * TERMS
    for _ in range(_SWEEPS):
        for i in range(TERMS):
            if gram[i][i]:
                rest = sum(gram[i][j] * found[j] for j in range(TERMS) if j != i)
                found[i] = max((moments[i] - rest) / gram[i][i], 0.0)
    return found


def _covariance(rows: Sequence[tuple[Sequence[float], float]]) -> list[list[float]]:
    """Return the inverse of the weighted sum of squares of the terms, for errors of standard deviation 1.

    A term that no step had adds nothing. Terms that always came together are kept apart by a ridge.
    """
    gram = [[sum(weight * row[i] * row[j] for row, weight in rows) for j in range(TERMS)] for i in range(TERMS)]
    seen = [i for i in range(TERMS) if gram[i][i]]
    scale = [math.sqrt(gram[i][i]) if gram[i][i] else 1.0 for i in range(TERMS)]
    left = [[gram[i][j] / (scale[i] * scale[j]) + (_RIDGE if i == j else 0.0) for j in seen] for i in seen]
    inverse = _inverse(left)
    found = [[0.0] * TERMS for _ in range(TERMS)]
    for row, i in zip(inverse, seen, strict=True):
        for value, j in zip(row, seen, strict=True):
            found[i][j] = value / (scale[i] * scale[j])
    return found


def _inverse(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the inverse of a positive definite matrix, by elimination."""
    size = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for i in range(size):
        pivot = rows[i][i]
        rows[i] = [value / pivot for value in rows[i]]
        for j in range(size):
            if j != i and rows[j][i]:
                factor = rows[j][i]
                rows[j] = [value - factor * own for value, own in zip(rows[j], rows[i], strict=True)]
    return [row[size:] for row in rows]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
