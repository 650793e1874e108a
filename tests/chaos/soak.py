"""A soak of `monitor serve`: engines that never rest, questions that keep coming, and memory that must not grow.

    python -m tests.chaos.soak --seconds 7200 --engines 25 --steps-per-s 5 --memory-budget 768M

Prints a line a minute and a table of the two halves at the end. Exits with 1 if the second half's maximum of resident
memory is more than 2 % above the first's, if a batch was lost, a question failed, or descriptors or threads grew.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from tests.chaos.fleet_process import PublishedTotals, engine_name
from tests.chaos.service_process import ProcessCost, ServiceProcess, process_cost

SAMPLE_EVERY_S: Final = 5.0
PRINT_EVERY_S: Final = 60.0
MAX_GROWTH: Final = 0.02
MAX_MORE_DESCRIPTORS: Final = 16
"""Connections of questions, and segments of the history that are just being closed."""
CATCH_UP_S: Final = 120.0


class SoakSample(NamedTuple):
    """One look at the service. `published` and `lost` are totals, `slowest_s` is of the questions asked then."""

    at_s: float
    cost: ProcessCost
    published: PublishedTotals
    batches_lost: int
    slowest_s: float
    failed_questions: int


class FleetProcess:
    """The engines, in a process of their own."""

    def __init__(self, folder: Path, engines: int, steps_per_s: float, scale: int = 1) -> None:
        command = [sys.executable, "-m", "tests.chaos.fleet_process", str(folder)]
        command += [str(engines), str(steps_per_s), str(scale)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.published = PublishedTotals()
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError("the engines did not start")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.published = msgspec.json.decode(line, type=PublishedTotals)

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class QuestionClient:
    """Asks the service what a page asks, a different engine each time."""

    def __init__(self, client: httpx.Client, engines: int) -> None:
        self._client = client
        self._numbers = itertools.cycle(range(engines))
        self.failed = 0

    def ask(self) -> tuple[float, list[dict[str, Any]]]:
        """Ask each question once. Return the seconds of the slowest and the engines as the service lists them."""
        name = engine_name(next(self._numbers))
        views: list[dict[str, Any]] = []
        slowest_s = 0.0
        for path, parameters in (
            ("/api/engines", {}),
            ("/api/findings", {}),
            ("/api/sources", {}),
            ("/api/memory-budget", {}),
            ("/api/points", {"engine": name, "limit": "500"}),
            ("/api/requests", {"engine": name}),
            ("/api/events", {"engine": name, "limit": "200"}),
            ("/metrics", {}),
            ("/healthz", {}),
        ):
            began_s = time.monotonic()
            try:
                answer = self._client.get(path, params=parameters)
                self.failed += answer.status_code != 200
                if path == "/api/engines" and answer.status_code == 200:
                    views = answer.json()
            except httpx.HTTPError:
                self.failed += 1
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        return slowest_s, views


@contextmanager
def running_soak(engines: int, steps_per_s: float, budget: str) -> Iterator[tuple[FleetProcess, ServiceProcess]]:
    """Start the engines and the service, and wait until the service has all of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscope-soak-")))
        fleet = FleetProcess(folder, engines, steps_per_s)
        stack.callback(fleet.close)
        arguments = ["--port", "0", "--data", str(folder / "data"), "--keep-bytes", "2G"]
        for number in range(engines):
            arguments += ["--events", f"ipc://{folder}/events-{number}"]
        service = ServiceProcess(*arguments, *(["--memory-budget", budget] if budget else []))
        stack.callback(service.close)
        deadline = time.monotonic() + CATCH_UP_S
        while len([view for view in service.client.get("/api/engines").json() if view["signal"] == "stream"]) < engines:
            if time.monotonic() > deadline:
                raise RuntimeError("the service does not have all engines")
            time.sleep(0.5)
        yield fleet, service


def soak(seconds: float, fleet: FleetProcess, service: ServiceProcess, engines: int) -> list[SoakSample]:
    """Sample the service for so long, and print a line a minute."""
    questions = QuestionClient(service.client, engines)
    samples: list[SoakSample] = []
    began_s = printed_s = time.monotonic()
    while (now_s := time.monotonic()) - began_s < seconds:
        slowest_s, views = questions.ask()
        lost = sum(view["batches_lost"] + view["events_dropped"] for view in views)
        cost = process_cost(service.process.pid)
        samples.append(SoakSample(now_s - began_s, cost, fleet.published, lost, slowest_s, questions.failed))
        if now_s - printed_s >= PRINT_EVERY_S:
            printed_s = now_s
            print(progress_line(samples), flush=True)
        time.sleep(max(0.0, now_s + SAMPLE_EVERY_S - time.monotonic()))
    return samples


def progress_line(samples: list[SoakSample]) -> str:
    """Return the time, memory, rates and losses since the beginning."""
    last = samples[-1]
    return (
        f"{last.at_s / 60:6.1f} min  PSS {last.cost.pss / 2**20:7.1f} MiB  RSS {last.cost.rss / 2**20:7.1f} MiB"
        f"  {rate(samples, 'events'):,.0f} events/s  {rate(samples, 'block_events'):,.0f} block events/s"
        f"  {last.cost.descriptors} fds  {last.cost.threads} threads  {last.cost.cpu_s / last.at_s:.0%} of a core"
        f"  lost {last.batches_lost}  slowest {last.slowest_s:.2f} s  failed {last.failed_questions}"
    )


def rate(samples: list[SoakSample], name: str) -> float:
    """Return what was published a second between the first and the last sample: events, block_events or batches."""
    last = samples[-1].published
    first = next((sample.published for sample in samples if sample.published.at_s), last)
    passed_s = last.at_s - first.at_s
    return float(getattr(last, name) - getattr(first, name)) / passed_s if passed_s else 0.0


class SoakHalf(NamedTuple):
    """The maximum of each measure over one half."""

    pss: int
    rss: int
    descriptors: int
    threads: int
    slowest_s: float


def half_of(samples: list[SoakSample]) -> SoakHalf:
    """Return the maxima of some samples."""
    costs = [sample.cost for sample in samples]
    return SoakHalf(
        max(cost.pss for cost in costs),
        max(cost.rss for cost in costs),
        max(cost.descriptors for cost in costs),
        max(cost.threads for cost in costs),
        max(sample.slowest_s for sample in samples),
    )


def problems_of(samples: list[SoakSample]) -> list[str]:
    """Return what the soak must not show, empty if it is as it should be."""
    middle = len(samples) // 2
    first, second = half_of(samples[:middle]), half_of(samples[middle:])
    problems = []
    for name, before, after in (("PSS", first.pss, second.pss), ("RSS", first.rss, second.rss)):
        if after > before * (1 + MAX_GROWTH):
            problems.append(f"{name} grew by {after / before - 1:.1%} from one half to the next")
    if second.descriptors > first.descriptors + MAX_MORE_DESCRIPTORS:
        problems.append(f"descriptors grew from {first.descriptors} to {second.descriptors}")
    if second.threads > first.threads + MAX_MORE_DESCRIPTORS:
        problems.append(f"threads grew from {first.threads} to {second.threads}")
    if samples[-1].batches_lost:
        problems.append(f"{samples[-1].batches_lost} batches or events were lost")
    if samples[-1].failed_questions:
        problems.append(f"{samples[-1].failed_questions} questions failed")
    return problems


def table_of(samples: list[SoakSample], engines: int) -> str:
    """Return the figures of both halves."""
    middle = len(samples) // 2
    minutes = samples[-1].at_s / 60
    lines = [
        f"{engines} engines for {minutes:.0f} minutes: {rate(samples, 'events'):,.0f} events/s,"
        f" {rate(samples, 'block_events'):,.0f} block events/s, {rate(samples, 'batches'):,.0f} batches/s",
        f"{'maximum of':<14}{'PSS MiB':>10}{'RSS MiB':>10}{'fds':>8}{'threads':>10}{'slowest answer s':>18}",
    ]
    for name, part in (("first half", samples[:middle]), ("second half", samples[middle:])):
        half = half_of(part)
        memory = f"{half.pss / 2**20:>10.1f}{half.rss / 2**20:>10.1f}"
        lines.append(f"{name:<14}{memory}{half.descriptors:>8}{half.threads:>10}{half.slowest_s:>18.2f}")
    first, second = half_of(samples[:middle]), half_of(samples[middle:])
    lines.append(
        f"growth: PSS {second.pss / first.pss - 1:+.2%}, RSS {second.rss / first.rss - 1:+.2%};"
        f" {samples[-1].cost.cpu_s / samples[-1].at_s:.0%} of a core; {samples[-1].batches_lost} lost;"
        f" {samples[-1].failed_questions} questions failed"
    )
    return "\n".join(lines)


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak")
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--engines", type=int, default=25)
    parser.add_argument("--steps-per-s", type=float, default=5.0, help="of each engine")
    parser.add_argument("--memory-budget", default="768M")
    parsed = parser.parse_args()
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores: {' '.join(sys.argv[1:])}", flush=True)
    with running_soak(parsed.engines, parsed.steps_per_s, parsed.memory_budget) as (fleet, service):
        samples = soak(parsed.seconds, fleet, service, parsed.engines)
        budget = service.client.get("/api/memory-budget").json()
        changes = [line for line in service.lines if "memory budget of" in line]
    print(table_of(samples, parsed.engines))
    print("\n".join(changes))
    print(
        f"budget {parsed.memory_budget}: {budget['reductions']} reductions, {budget['restorations']} undone,"
        f" {budget['kept_share']:.0%} of the plan kept: {'; '.join(budget['given_up']) or 'the default bounds'}"
    )
    problems = problems_of(samples)
    print("; ".join(problems) or "as it should be")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
