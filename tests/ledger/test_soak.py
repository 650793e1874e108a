"""The property of test_exact.py for as long as one likes to wait: `make prove`."""

from __future__ import annotations

import random

import pytest

from tests.ledger.test_exact import FAULTS, drive, random_lab


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(100))
def test_two_hundred_thousand_random_steps(seed: int) -> None:
    """4 × 100 labs of 500 steps."""
    for faults in FAULTS:
        rng = random.Random(f"soak {seed} {faults}")
        drive(random_lab(rng, faults), 500, rng)
