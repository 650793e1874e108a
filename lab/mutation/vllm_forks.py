"""Runs modules of the tests with vLLM, in forks of one process that has imported it.

vLLM takes ten seconds to import and a run of its bare scheduler a fraction of one. A test that would start a process
for its run has it made in a fork here, with the mutant applied in it. Each connection to the socket is one run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from .called_functions import CalledFunctions
from .live_mutants import NotApplied, apply
from .mutant_sites import Mutant

MODULES: Final = ("tests.probes.bare_scheduler", "tests.probes.bare_incidents")
START_S: Final = 300
RUN_S: Final = 300
"""Bound of a run on a busy machine: a mutant may make it endless."""


class ForkOrder(msgspec.Struct):
    """A run: the module's main with these arguments. record: report which functions of these folders it calls."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    mutant: Mutant | None = None
    record: list[str] = []


class ForkAnswer(msgspec.Struct):
    """What became of a run: its exit status, its error, its CPU time, and the places of functions that it called."""

    status: int
    error: str = ""
    cpu_s: float = 0.0
    called: list[str] = []


class VllmForks:
    """The process and what runs in its forks: `run` stands in for subprocess.run. Without a Python nothing can run."""

    def __init__(self, python: str, directory: Path, record: Sequence[str] = ()) -> None:
        self.mutant: Mutant | None = None
        self.record = list(record)
        self.called: set[str] = set()
        self.cpu_s = 0.0
        self._path = str(directory / "vllm.socket")
        command = [python, "-m", "kvscope.lab.mutation.vllm_forks", self._path]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{python} does not import vLLM")

    def run(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Run `PYTHON -m MODULE ARGUMENT…` in a fork."""
        order = ForkOrder(command[2], list(command[3:]), dict(env), self.mutant, self.record)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._path)
            connection.sendall(msgspec.json.encode(order))
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                received = file.read()
        answer = msgspec.json.decode(received, type=ForkAnswer) if received else ForkAnswer(1, "the fork died")
        self.called.update(answer.called)
        self.cpu_s += answer.cpu_s
        return subprocess.CompletedProcess(command, answer.status, "", answer.error)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def run_order(order: ForkOrder) -> ForkAnswer:
    """Make one run in this process."""
    os.environ.update(order.environment)
    calls = CalledFunctions(tuple(order.record))
    try:
        if order.mutant is not None:
            with contextlib.suppress(NotApplied):
                apply(order.mutant)
        sys.argv = [order.module, *order.arguments]
        with calls.noted() if order.record else contextlib.nullcontext():
            importlib.import_module(order.module).main()
    except BaseException:  # whatever a mutant causes kills it
        return ForkAnswer(1, traceback.format_exc(limit=-5), time.process_time())
    return ForkAnswer(0, "", time.process_time(), calls.places())


def main() -> None:
    """Serve until the process is killed."""
    for module in MODULES:
        importlib.import_module(module)
    import vllm.v1.core.sched.scheduler  # noqa: F401

    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    os.dup2(2, 1)  # what vLLM prints is no answer
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            signal.alarm(RUN_S)
            with connection.makefile("rb") as file:
                order = msgspec.json.decode(file.read(), type=ForkOrder)
            connection.sendall(msgspec.json.encode(run_order(order)))
            os._exit(0)
        connection.close()


if __name__ == "__main__":
    main()
