"""A real `kvscope engine serve` on free ports, for tests that need an engine in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from types import TracebackType

from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import LiveStream
from tests.waiting import PATIENCE_S

READY = re.compile(r"listening on (http://\S+?), events on (\S+), replay on (\S+)")


class EngineProcess:
    """An engine that serves. `url` is where, `events` and `replay` its stream; `engine` is its id."""

    def __init__(self, *arguments: str, engine_id: str = "", environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = [
            sys.executable,
            "-m",
            "kvscope.engine",
            "serve",
            "--port",
            "0",
            "--events",
            "tcp://127.0.0.1:*",
            *arguments,
        ]
        self.process = subprocess.Popen(
            [*command, *(("--engine-id", engine_id) if engine_id else ())],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = READY.search(line)
        if match is None:
            self.stop()
            raise AssertionError(f"the engine did not start: {line}{self.log()}")
        self.url, self.events, self.replay = match.groups()
        self.engine = engine_id or f"tiny@{self.url.removeprefix('http://')}/0"

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def log(self) -> str:
        """What it wrote to stderr until now."""
        self._log.seek(0)
        return self._log.read()

    def stop(self, how: int = signal.SIGTERM) -> int:
        """Send it a signal, if it still runs; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            assert self.process.stdout is not None
            self.process.stdout.close()

    def stream(self) -> LiveStream:
        """A reader of its events."""
        return LiveStream(self.events, self.replay)

    def ledger(self, until: Callable[[EngineLedger], bool]) -> EngineLedger:
        """The ledger of its stream, read from now until that is so."""
        ledger = EngineLedger(self.engine)
        with closing(self.stream()) as stream:
            follow(stream, [ledger], lambda: ledger.ready and until(ledger))
        return ledger


def follow(stream: LiveStream, ledgers: Iterable[EngineLedger], until: Callable[[], bool]) -> None:
    """Apply what the stream brings until that is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not until():
        assert time.monotonic() < deadline, "it did not come to that"
        for received in stream.receive(0.05):
            for ledger in ledgers:
                ledger.apply(received.frame)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until that is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.01)
