"""Seeds of tests that try whatever a seed draws: few are tried with each change, the rest by `make prove`."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet


def drawn_seeds(few: int, all_of_them: int) -> list[ParameterSet]:
    return [pytest.param(seed, marks=() if seed < few else pytest.mark.prove) for seed in range(all_of_them)]
