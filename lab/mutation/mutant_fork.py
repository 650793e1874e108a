"""A forked process with one mutant in it, which runs the tests that reach it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Collection
from typing import Final, NoReturn

import pytest

from .. import vllm_python
from .live_mutants import NotApplied, apply
from .mutant_sites import Mutant
from .vllm_forks import VllmForks

CPU_TIMES: Final = 5.0
"""A mutant whose tests take so many times their usual CPU time, and LEAST_CPU_S, is killed by that."""
LEAST_CPU_S: Final = 20.0
WALL_TIMES: Final = 10.0
"""The same by the clock, for a mutant that waits for ever: the machine may be busy."""
LEAST_WALL_S: Final = 120.0
TIME_LIMITS: Final = (signal.SIGPROF, signal.SIGALRM)


class _FirstFailure:
    """A pytest plugin: reports the first test that fails."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write its name."""
        if report.failed:
            os.write(self.pipe, report.nodeid.encode()[:1000])


class MutantFork:
    """The process, from its start to its end. mutant: None for a run that shows that the tests pass by themselves."""

    def __init__(self, mutant: Mutant | None, tests: list[str], usual_s: float, forks: VllmForks | None = None) -> None:
        self._failures, pipe = os.pipe()
        faulthandler.cancel_dump_traceback_later()  # a fork would wait for pytest's thread, which it does not have
        self.process = os.fork()
        if self.process == 0:
            os.close(self._failures)
            _run(mutant, tests, usual_s, forks, pipe)
        os.close(pipe)

    def fate(self, status: int) -> tuple[str, str]:
        """Return what its end shows, and the test that killed it."""
        with os.fdopen(self._failures, "rb") as file:
            failed = file.read().decode()
        if os.WIFSIGNALED(status):
            return ("killed", "") if os.WTERMSIG(status) in TIME_LIMITS else ("error", f"signal {os.WTERMSIG(status)}")
        ended = os.WEXITSTATUS(status)
        if ended == pytest.ExitCode.OK:
            return "survived", ""
        return ("killed", failed) if failed else ("error", f"exit status {ended}")


def next_ended(processes: Collection[int]) -> tuple[int, int]:
    """Wait for one of these processes; its id and status."""
    while True:
        process, status = os.wait()
        if process in processes:
            return process, status


def _run(mutant: Mutant | None, tests: list[str], usual_s: float, forks: VllmForks | None, pipe: int) -> NoReturn:
    status = 70
    try:
        signal.setitimer(signal.ITIMER_PROF, LEAST_CPU_S + CPU_TIMES * usual_s)
        signal.alarm(round(LEAST_WALL_S + WALL_TIMES * usual_s))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if forks is not None:
            forks.mutant, forks.record = mutant, []
            vllm_python.run_program = forks.run
        if mutant is not None:
            with contextlib.suppress(NotApplied) if forks is not None else contextlib.nullcontext():
                apply(mutant)
        plugin = _FirstFailure(pipe)
        status = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not prove", *tests], plugins=[plugin]))
    finally:
        os._exit(status)
