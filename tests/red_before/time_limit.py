"""A pytest plug-in of scripts.red_before: a test that takes too long fails, since a defect may be a hang."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from types import FrameType
from typing import Final, NoReturn

import pytest

LIMIT_S: Final = int(os.environ.get("RED_BEFORE_LIMIT_S", "30"))


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"not over after {LIMIT_S} s")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Let the test run until LIMIT_S are over."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(LIMIT_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
