"""How fast `monitor doctor` reads and judges a whole log, in MB a second of one core, and how much memory it takes.

    python -m benchmarks.logs [--mb N] [--repeats N]

Three made logs of the same size: statistics alone, one line every ten seconds as vLLM
logs by default; one such line to 19 of answered requests; and
answered requests alone. The load goes up and down, and its pool is never short of blocks. Each run is a process of its
own. Its CPU time without that of a log of 100 lines, which is the time to start, is the time of the log. Memory is the
most that was resident.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.machine import machine

BEGAN: Final = datetime(2026, 11, 1, tzinfo=UTC)
STATISTICS_EVERY_S = 10
LINES_OF_START = 100
LOGS: Final = {"statistics": 1, "one line of statistics in 20": 20, "answered requests": 0}
"""How many lines there are to one of statistics: 0 if there is none but at the beginning."""
AIMS: Final = {"statistics": 5, "answered requests": 20}


class Run(NamedTuple):
    """What one run took."""

    cpu_s: float
    most_mib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    print(machine("msgspec"))
    print(f"{args.mb:g} MB each, medians of {args.repeats}\n")
    print(f"{'':32}{'CPU, s':>10}{'MB/s':>8}{'aim':>6}{'memory, MiB':>14}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "engine.log")
        for name, lines_each in LOGS.items():
            write(path, lines_each, LINES_OF_START, math.inf)
            start_s = statistics.median(run(path).cpu_s for _ in range(args.repeats))
            write(path, lines_each, sys.maxsize, args.mb * 1e6)
            runs = [run(path) for _ in range(args.repeats)]
            cpu_s = statistics.median(each.cpu_s for each in runs) - start_s
            most_mib = max(each.most_mib for each in runs)
            print(f"{name:32}{cpu_s:10.1f}{args.mb / cpu_s:8.1f}{AIMS.get(name, ''):>6}{most_mib:14.0f}")


def write(path: Path, lines_each: int, most_lines: int, most_bytes: float) -> None:
    """Write the lines of a log until either bound."""
    size = 0
    with path.open("w") as file:
        for line in islice(lines(lines_each), most_lines):
            size += file.write(line)
            if size >= most_bytes:
                return


def lines(lines_each: int) -> Iterator[str]:
    """Yield the lines of an engine's log without end."""
    for number in count():
        if number < 10 or (lines_each and number % lines_each == 0):
            yield statistics_line(number * STATISTICS_EVERY_S // max(1, lines_each))
        else:
            client = f"10.0.{number % 250}.7:{number % 64_000}"
            yield f'(APIServer pid=77) INFO:     {client} - "POST /v1/completions HTTP/1.1" 200 OK\n'


def statistics_line(second: int) -> str:
    """Return vLLM's line of this second: usage goes up and down within an hour, between 35 and 85 %."""
    share = 0.6 + 0.25 * math.sin(second / 3_600 * math.tau)
    stamp = f"{BEGAN + timedelta(seconds=second):%m-%d %H:%M:%S}"
    return (
        f"(APIServer pid=77) INFO {stamp} [loggers.py:259] Engine 000: Avg prompt throughput: {4_000 * share:.1f}"
        f" tokens/s, Avg generation throughput: {900 * share:.1f} tokens/s, Running: {int(90 * share)} reqs, Waiting: 0"
        f" reqs, GPU KV cache usage: {share:.1%}, Prefix cache hit rate: 41.7%\n"
    )


def run(path: Path) -> Run:
    """Run the doctor on a log."""
    command = [sys.executable, "-m", "kvscope.monitor", "doctor", str(path), "--format", "json", "--fail-on", "never"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode in (0, 3), f"the doctor ended with {child.returncode}"
    return Run(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


if __name__ == "__main__":
    main()
