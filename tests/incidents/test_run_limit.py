"""A drawn run that takes too long is reported as not finished, whatever handles errors around it."""

from __future__ import annotations

import pytest

from kvscope.monitor.incidents.accuracy import accuracy_of
from kvscope.monitor.incidents.trial import run_trial


def test_a_run_beyond_its_limit_is_reported_and_counts_for_nothing() -> None:
    trial = run_trial(0, 61803, limit_s=0.05)
    assert not trial.finished
    assert trial.error == "not finished within 0.05 s"
    accuracy = accuracy_of([trial])
    assert (accuracy.unfinished, accuracy.failed, accuracy.hours) == (1, 0, 0.0)


@pytest.mark.parametrize("limit_s", [0.0, 300.0])
def test_a_run_within_its_limit_is_counted(limit_s: float) -> None:
    trial = run_trial(14, 61803, limit_s=limit_s)
    assert trial.finished
    assert not trial.error
    assert accuracy_of([trial]).steps == trial.steps > 0
