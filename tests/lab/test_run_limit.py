"""A drawn run that takes too long is reported as not finished, whatever handles errors around it."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable

import pytest

from kvscope.lab.accuracy import accuracy_of
from kvscope.lab.drain_limits import NotFinished
from kvscope.lab.trial import limited_to, run_trial

PATIENCE_S = 240.0


class Finalized:
    """Its finalizer, in which an exception is dropped, lasts until the limit has been raised."""

    def __del__(self) -> None:
        outlast_the_limit()


def outlast_the_limit() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pass


def collect_garbage() -> None:
    """Let the limit pass in a callback of the garbage collector."""

    def callback(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            gc.callbacks.remove(callback)
            outlast_the_limit()

    gc.callbacks.append(callback)
    gc.collect()


def run_beyond_limit(drop: Callable[[], object]) -> None:
    with limited_to(0.05):
        drop()
        outlast_the_limit()


@pytest.mark.parametrize("drop", [Finalized, collect_garbage])
def test_a_limit_that_is_raised_where_exceptions_are_dropped_is_raised_again(drop: Callable[[], object]) -> None:
    hook = sys.unraisablehook
    began = time.monotonic()
    with pytest.raises(NotFinished):
        run_beyond_limit(drop)
    assert time.monotonic() - began < PATIENCE_S
    assert sys.unraisablehook is hook


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
