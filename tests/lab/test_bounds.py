"""Exact bounds, compared with published values."""

from __future__ import annotations

import math

import pytest

from kvscope.monitor.base.confidence_bounds import rate_bounds, share_bounds


@pytest.mark.parametrize(
    ("hits", "of", "low", "high"),
    [
        (15, 15, 0.7820, 1.0),
        (0, 15, 0.0, 0.2180),
        (8, 10, 0.4439, 0.9748),
        (1, 2, 0.0126, 0.9874),
        (50, 100, 0.3983, 0.6017),
    ],
)
def test_a_share_has_clopper_pearson_bounds(hits: int, of: int, low: float, high: float) -> None:
    assert share_bounds(hits, of) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "low", "high"), [(0, 0.0, 3.6889), (1, 0.0253, 5.5716), (10, 4.7954, 18.3904), (100, 81.3636, 121.6273)]
)
def test_a_rate_has_poisson_bounds(count: int, low: float, high: float) -> None:
    assert rate_bounds(count, 1.0) == pytest.approx((low, high), abs=1e-3)
    assert rate_bounds(count, 4.0) == pytest.approx((low / 4, high / 4), abs=1e-3)


def test_without_a_trial_nothing_is_known() -> None:
    assert share_bounds(0, 0) == (0.0, 1.0)
    assert rate_bounds(0, 0.0) == (0.0, math.inf)
