"""95 % bounds of shares and rates: Clopper-Pearson for a share, Poisson for a count over an exposure.

Both are exact. From LARGE_COUNT on, the Poisson bounds are those of Wilson and Hilferty. They differ from the exact
ones by less than a thousandth and take no sum over the count.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

TAIL: Final = 0.025
"""The probability that is left out on each side."""
BISECTIONS: Final = 60
MOST_OF_A_RATE: Final = 10.0
"""The upper bound of a count is below so many times the count, and so many more."""

LARGE_COUNT: Final = 200
"""Events in a count."""
Z: Final = 1.959964
"""Standard deviations that leave TAIL out on each side."""


class Bounds(NamedTuple):
    """Lower and upper bound, in the unit of what they bound."""

    low: float
    high: float


def share_bounds(hits: int, of: int) -> Bounds:
    """Return the Clopper-Pearson bounds of a share of `hits` among `of`. (0, 1) for none."""
    if not of:
        return Bounds(0.0, 1.0)
    low = 0.0 if not hits else _root(lambda share: 1 - _binomial_cdf(hits - 1, of, share) >= TAIL, 1.0)
    high = 1.0 if hits == of else _root(lambda share: _binomial_cdf(hits, of, share) <= TAIL, 1.0)
    return Bounds(low, high)


def rate_bounds(count: int, exposure: float) -> Bounds:
    """Return the Poisson bounds of `count` events in `exposure`, per unit of it. Infinite without exposure."""
    if exposure <= 0:
        return Bounds(0.0, math.inf)
    if count >= LARGE_COUNT:
        return Bounds(_wilson_hilferty(count, -Z) / exposure, _wilson_hilferty(count + 1, Z) / exposure)
    most = MOST_OF_A_RATE * (count + 1)
    low = 0.0 if not count else _root(lambda mean: 1 - _poisson_cdf(count - 1, mean) >= TAIL, most)
    high = _root(lambda mean: _poisson_cdf(count, mean) <= TAIL, most)
    return Bounds(low / exposure, high / exposure)


def binomial_tail(hits: int, of: int, share: float) -> float:
    """Return the probability of `hits` or more among `of`, each with the probability `share`."""
    return 1.0 if hits <= 0 else max(0.0, 1 - _binomial_cdf(hits - 1, of, share))


def _wilson_hilferty(count: int, z: float) -> float:
    return count * math.pow(1 - 1 / (9 * count) + z / (3 * math.sqrt(count)), 3)


def _root(beyond: Callable[[float], bool], most: float) -> float:
    """Return where `beyond` becomes true between 0 and `most`. It stays true from there on."""
    low, high = 0.0, most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return (low + high) / 2


def _binomial_cdf(hits: int, of: int, share: float) -> float:
    if share <= 0:
        return 1.0
    if share >= 1:
        return float(hits >= of)
    logs = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(share)
        + (of - k) * math.log1p(-share)
        for k in range(hits + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))


def _poisson_cdf(count: int, mean: float) -> float:
    if mean <= 0:
        return 1.0
    return min(1.0, math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1)))
