"""Damages real input in every way that chance finds, and counts what escapes, hangs or grows.

    python -m kvscope.lab.fuzzing.campaign --inputs 20000 --seed 1 [TARGET …]

Each target runs in a process of its own, so that a crash of a C library is counted and the rest goes on. Every number
below --inputs is one input, drawn from the seed, the target and the number: `--only NUMBER` repeats it. One in 400 is
of 2 MiB, the others of 256 KiB at most.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from kvscope.monitor.contract.journal import read_segment

from .mutations import segment_of
from .target_table import TARGETS

HANG_S: Final = 2.0
"""Of processor time: this machine may be busy with something else."""
LARGE_HANG_S: Final = 10.0
"""The same for an input of 2 MiB: a log of that size is parsed line by line."""
STUCK_S: Final = 60
GROWTH_BYTES: Final = 200 << 20
LARGE_EVERY: Final = 400
RECORDS_OF_EACH: Final = 40
RECORD_BYTES: Final = 16 << 10
"""What is taken of a recording: its first records of no more than this size."""
WARM_UP: Final = 50
"""Inputs after which growth counts: imports, caches and the allocator's arenas come with the first."""


class TargetResult(NamedTuple):
    """What came of a target's inputs: `escapes`, `hangs` and `growth` name inputs by number."""

    target: str
    inputs: int
    seconds: float
    outcomes: dict[str, int]
    escapes: dict[str, list[int]]
    hangs: dict[str, float]
    growth: dict[str, int]
    grown_bytes: int
    slowest_s: float

    @property
    def is_clean(self) -> bool:
        """Whether nothing escaped, hung or grew."""
        return not (self.escapes or self.hangs or self.growth)

    def line(self) -> str:
        """Return the counts as a line of text."""
        escapes = sum(map(len, self.escapes.values()))
        return (
            f"{self.target:18} {self.inputs:6,} inputs in {self.seconds:5.0f} s: {escapes} escapes, {len(self.hangs)}"
            f" hangs, {len(self.growth)} growths; slowest {self.slowest_s:.2f} s of processor time,"
            f" +{self.grown_bytes >> 20} MiB; {self.outcomes}"
        )


class _Stuck(BaseException):
    """An input took STUCK_S by the clock."""


def fuzz(
    target: str, seed: int, numbers: range, seconds: float, progress: int, recordings: Path | None
) -> TargetResult:
    """Run a target's inputs in this process until `seconds` are over; `progress`: a file descriptor."""
    contents = segments_under(recordings)
    outcomes: Counter[str] = Counter()
    escapes: dict[str, list[int]] = {}
    hangs: dict[str, float] = {}
    growth: dict[str, int] = {}
    slowest_s = 0.0
    begun_s = time.monotonic()
    first_peak = peak = 0
    with tempfile.TemporaryDirectory(prefix="kvscope-fuzz-") as folder:
        reader = TARGETS[target](Path(folder), contents)
        try:
            for number in numbers:
                if time.monotonic() - begun_s > seconds:
                    break
                content = input_of(reader, target, seed, number)
                os.pwrite(progress, f"{number:012}".encode(), 0)
                began_s = time.process_time()
                signal.alarm(STUCK_S)
                try:
                    outcome = reader.read(content)
                    outcomes[outcome] += 1
                    if outcome == "unnamed":
                        escapes.setdefault("an error that does not name its target", []).append(number)
                except _Stuck:
                    hangs[str(number)] = float(STUCK_S)
                    outcomes["stuck"] += 1
                except Exception as error:
                    outcomes["escape"] += 1
                    escapes.setdefault(_cause(error), []).append(number)
                signal.alarm(0)
                took_s = time.process_time() - began_s
                slowest_s = max(slowest_s, took_s)
                if took_s > (LARGE_HANG_S if is_large(number) else HANG_S):
                    hangs[str(number)] = round(took_s, 2)
                before, peak = peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
                if outcomes.total() <= WARM_UP:
                    first_peak = peak
                elif peak - before > GROWTH_BYTES:
                    growth[str(number)] = peak - before
        finally:
            reader.close()
    if peak - first_peak > GROWTH_BYTES and not growth:
        growth["all"] = peak - first_peak
    seconds = time.monotonic() - begun_s
    return TargetResult(
        target, outcomes.total(), seconds, dict(outcomes), escapes, hangs, growth, peak - first_peak, slowest_s
    )


def segments_under(recordings: Path | None) -> list[bytes]:
    """Return the beginning of each journal segment under a directory."""
    if recordings is None:
        return []
    found = []
    for path in sorted(recordings.rglob("*.kvj")):
        payloads = islice(read_segment(path), RECORDS_OF_EACH)
        found.append(segment_of([payload for payload in payloads if len(payload) <= RECORD_BYTES]))
    return found


def is_large(number: int) -> bool:
    """Whether the input of that number is one of 2 MiB."""
    return number % LARGE_EVERY == LARGE_EVERY - 1


def input_of(reader: Any, target: str, seed: int, number: int) -> bytes:
    """Return the input of that number."""
    rng = random.Random(f"{seed}/{target}/{number}")
    content = reader.large(rng) if is_large(number) else reader.damaged(rng)
    assert isinstance(content, bytes)
    return content


def _cause(error: BaseException) -> str:
    """Return the type, the message and the last lines of ours that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-3:]))
    return f"{type(error).__name__} at {places}: {str(error)[:160]}"


def run_target(
    target: str, seed: int, inputs: int, seconds: float, recordings: Path | None = None, first: int = 0
) -> TargetResult:
    """Run a target in a process of its own, again behind each input at which it crashed."""
    found: list[TargetResult] = []
    crashes: dict[str, list[int]] = {}
    until_s = time.monotonic() + seconds
    while True:
        with tempfile.NamedTemporaryFile() as progress:
            command = [
                sys.executable,
                "-m",
                "kvscope.lab.fuzzing.campaign",
                "--child",
                progress.name,
                "--first",
                str(first),
            ]
            command += ["--seed", str(seed), "--inputs", str(inputs)]
            command += ["--seconds", str(max(until_s - time.monotonic(), 1.0)), target]
            if recordings is not None:
                command += ["--recordings", str(recordings)]
            environment = {name: value for name, value in os.environ.items() if name != "KVSCOPE_VALIDATE"}
            child = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=False)
            last = int(progress.read() or b"0")
        if child.returncode == 0:
            found.append(TargetResult(**json.loads(child.stdout.splitlines()[-1])))
            break
        crashes.setdefault(f"the process ended with {child.returncode}", []).append(last)
        first = last + 1
        if sum(map(len, crashes.values())) > 20 or first >= inputs:
            break
    if not found:
        return TargetResult(target, first, 0.0, {}, crashes, {}, {}, 0, 0.0)
    return found[-1]._replace(escapes={**crashes, **found[-1].escapes})


def repeat(target: str, seed: int, number: int, recordings: Path | None) -> None:
    """Run one input again, and let what it raises escape."""
    contents = segments_under(recordings)
    with tempfile.TemporaryDirectory(prefix="kvscope-fuzz-") as folder:
        reader = TARGETS[target](Path(folder), contents)
        try:
            content = input_of(reader, target, seed, number)
            print(f"{len(content):,} bytes: {content[:200]!r}")
            began_s = time.process_time()
            print(reader.read(content), f"{time.process_time() - began_s:.2f} s")
        finally:
            reader.close()


def _raise_stuck(_: int, __: FrameType | None) -> None:
    raise _Stuck


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the targets, print a line for each, and exit with 1 if anything escaped, hung or grew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all if none is named")
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--recordings", type=Path, help="a directory whose journals are damaged too")
    parser.add_argument("--only", type=int, help="repeat this input, and let what it raises escape")
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.only is not None:
        repeat(given.targets[0], given.seed, given.only, given.recordings)
        return 0
    if given.child is not None:
        signal.signal(signal.SIGALRM, _raise_stuck)
        logging.disable()  # damage is logged, which is not what is counted here
        progress = os.open(given.child, os.O_WRONLY)
        numbers = range(given.first, given.inputs)
        result = fuzz(given.targets[0], given.seed, numbers, given.seconds, progress, given.recordings)
        print("\n" + json.dumps(result._asdict()))
        return 0
    print(f"seed {given.seed}", flush=True)
    is_clean = True
    for target in given.targets or TARGETS:
        result = run_target(target, given.seed, given.inputs, given.seconds, given.recordings)
        is_clean &= result.is_clean
        print(result.line(), flush=True)
        for what in ("escapes", "hangs", "growth"):
            for cause, numbers in getattr(result, what).items():
                shown = numbers[:5] if isinstance(numbers, list) else numbers
                print(f"    {what}: {cause}: {shown}{f' of {len(numbers)}' if isinstance(numbers, list) else ''}")
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
