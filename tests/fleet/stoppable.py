"""A program that a test kills, suspends and starts again."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.dashboards.programs import running


class StoppableProgram:
    """A process with its output in `log`. `end` leaves none behind."""

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self.command = list(command)
        self.log = log
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.process: subprocess.Popen[bytes] = self._stack.enter_context(running(self.command, self.log))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self.process.poll() is None:
            self.resume()
        self._stack.close()
