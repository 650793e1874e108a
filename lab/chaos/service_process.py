"""`monitor serve` in a process of its own: what it costs, and whether it answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import httpx2


class ProcessCost(NamedTuple):
    """What a process takes now. Memory in bytes, processor time in seconds.

    `anonymous`: resident memory that is its own, however many processes share the libraries.
    """

    pss: int
    rss: int
    anonymous: int
    descriptors: int
    threads: int
    cpu_s: float


def process_cost(pid: int) -> ProcessCost:
    """Read /proc of a process. Raises OSError if it has ended."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    memory = {
        name: int(kib) << 10 for name, kib in re.findall(r"^(Pss|Rss|Anonymous):\s+(\d+) kB", rollup, re.MULTILINE)
    }
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessCost(memory["Pss"], memory["Rss"], memory["Anonymous"], descriptors, int(fields[17]), cpu_s)


class ServiceProcess:
    """A `monitor serve`, or another `service`, with these arguments on a free port.

    Raises RuntimeError if it does not start.
    """

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        service: str = "serve",
    ) -> None:
        command = [*prefix, sys.executable, "-m", "kvscope.monitor", service, *arguments]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        self.url = ""
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            address = re.search(r"http://[\w.]+:\d+", line) if line.startswith("kvscope serves") else None
            if address is not None:
                self.url = address[0]
                break
        else:
            self.process.wait()
            raise RuntimeError(f"monitor {service} did not start: " + " / ".join(self.lines[-3:]))
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()
        self.client = httpx2.Client(base_url=self.url, timeout=10, trust_env=False)

    def _read_lines(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            del self.lines[:-1000]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and those it started."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill it."""
        self.client.close()
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
