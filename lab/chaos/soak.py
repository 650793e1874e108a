"""A soak of `monitor serve`: engines that never rest, questions that keep coming, and memory that must not grow.

    python -m kvscope.lab.chaos.soak --seconds 7200 --engines 25 --steps-per-s 5 --memory-budget 768M

    python -m kvscope.lab.chaos.soak --seconds 5400 --engines 1 --steps-per-s 20 --memory-budget "" --view-every 20

The second one also opens the page in a browser every 20 s, goes through its views and the past, and closes it.

Prints a line a minute and a table of the two halves at the end. Exits with 1 if memory grew, if a batch was lost, a
question or a view failed, or descriptors or threads grew. Memory grew if the second half's maximum is more than 2 %
above the first's. The timeline in memory is an hour long, so a run of less than two hours is judged by its last half
hour: the mean of its last third must be no more than 2 % above that of its first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import httpx2
import msgspec

from .fleet_process import PublishedTotals, engine_name
from .page_views import PageViews
from .service_process import ProcessCost, ServiceProcess, process_cost

SAMPLE_EVERY_S: Final = 5.0
PRINT_EVERY_S: Final = 60.0
MAX_GROWTH: Final = 0.02
LEVEL_S: Final = 1800.0
LEVEL_OF: Final = ("pss", "anonymous")
TWO_HOURS_S: Final = 7200.0
"""From here on the second half must not grow."""
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
    views: int = 0
    failed_views: int = 0


class FleetProcess:
    """The engines, in a process of their own."""

    def __init__(self, folder: Path, engines: int, steps_per_s: float, scale: int = 1) -> None:
        command = [sys.executable, "-m", "kvscope.lab.chaos.fleet_process", str(folder)]
        command += [str(engines), str(steps_per_s), str(scale)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.published = PublishedTotals()
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise RuntimeError("the engines did not start")
        self._reported = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._reported:
                self.published = msgspec.json.decode(line, type=PublishedTotals)
                self._reported.notify_all()

    def next_report(self) -> PublishedTotals:
        """Return the next report once it is here. Raise RuntimeError when none came in a minute."""
        with self._reported:
            if not self._reported.wait(60):
                raise RuntimeError("the engines stopped reporting")
            return self.published

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


class QuestionClient:
    """Asks the service what a page asks, a different engine each time."""

    def __init__(self, client: httpx2.Client, engines: int) -> None:
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
            except httpx2.HTTPError:
                self.failed += 1
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        return slowest_s, views


@contextmanager
def running_soak(
    engines: int, steps_per_s: float, budget: str, keep_bytes: str = "2G"
) -> Iterator[tuple[FleetProcess, ServiceProcess]]:
    """Start the engines and the service, and wait until the service has all of them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscope-soak-")))
        fleet = FleetProcess(folder, engines, steps_per_s)
        stack.callback(fleet.close)
        arguments = ["--port", "0", "--data", str(folder / "data"), "--keep-bytes", keep_bytes]
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


def soak(
    seconds: float,
    fleet: FleetProcess,
    service: ServiceProcess,
    engines: int,
    pages: PageViews | None = None,
    csv: Path | None = None,
) -> list[SoakSample]:
    """Sample the service for so long, print a line a minute, and write each sample to `csv`."""
    questions = QuestionClient(service.client, engines)
    samples: list[SoakSample] = []
    began_s = printed_s = time.monotonic()
    while (now_s := time.monotonic()) - began_s < seconds:
        slowest_s, views = questions.ask()
        lost = sum(view["batches_lost"] + view["events_dropped"] for view in views)
        cost = process_cost(service.process.pid)
        viewed = (pages.viewed, pages.failed) if pages is not None else (0, 0)
        at_s = now_s - began_s
        samples.append(SoakSample(at_s, cost, fleet.published, lost, slowest_s, questions.failed, *viewed))
        if csv is not None:
            write_sample(csv, samples[-1])
        if now_s - printed_s >= PRINT_EVERY_S:
            printed_s = now_s
            print(progress_line(samples), flush=True)
        time.sleep(max(0.0, now_s + SAMPLE_EVERY_S - time.monotonic()))
    return samples


def write_sample(path: Path, sample: SoakSample) -> None:
    """Append a sample to a CSV file."""
    row = {"at_s": round(sample.at_s, 1), **sample.cost._asdict(), "views": sample.views}
    with path.open("a") as file:
        if not file.tell():
            print(*row, sep=",", file=file)
        print(*row.values(), sep=",", file=file)


def progress_line(samples: list[SoakSample]) -> str:
    """Return the time, memory, rates and losses since the beginning."""
    last = samples[-1]
    return (
        f"{last.at_s / 60:6.1f} min  PSS {last.cost.pss / 2**20:7.1f} MiB  RSS {last.cost.rss / 2**20:7.1f} MiB"
        f"  own {last.cost.anonymous / 2**20:7.1f} MiB"
        f"  {rate(samples, 'events'):,.0f} events/s  {rate(samples, 'block_events'):,.0f} block events/s"
        f"  {last.cost.descriptors} fds  {last.cost.threads} threads  {last.cost.cpu_s / last.at_s:.0%} of a core"
        f"  lost {last.batches_lost}  slowest {last.slowest_s:.2f} s  failed {last.failed_questions}"
        + (f"  views {last.views}" if last.views else "")
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


class LastHalfHour(NamedTuple):
    """Means over the first and last third of the last half hour, of PSS and of the process's own memory, in bytes."""

    pss: tuple[float, float]
    anonymous: tuple[float, float]


def last_half_hour(samples: list[SoakSample]) -> LastHalfHour:
    """Return what memory did at the end. A third has thirty views at one every 20 s, and a segment of the history."""
    end_s = samples[-1].at_s
    thirds = [
        [each.cost for each in samples if end_s - from_s <= each.at_s <= end_s - to_s]
        for from_s, to_s in ((LEVEL_S, LEVEL_S * 2 / 3), (LEVEL_S / 3, 0.0))
    ]
    pss, anonymous = ([mean([getattr(cost, name) for cost in third]) for third in thirds] for name in LEVEL_OF)
    return LastHalfHour((pss[0], pss[1]), (anonymous[0], anonymous[1]))


def memory_problems(samples: list[SoakSample]) -> list[str]:
    """Return how memory grew, empty if it is level."""
    middle = len(samples) // 2
    first, second = half_of(samples[:middle]), half_of(samples[middle:])
    changes: list[tuple[str, float, float]] = [("PSS", first.pss, second.pss), ("RSS", first.rss, second.rss)]
    span = "from one half to the next"
    if LEVEL_S < samples[-1].at_s < TWO_HOURS_S:
        pss, anonymous = last_half_hour(samples)
        changes = [("PSS", *pss), ("the process's own memory", *anonymous)]
        span = "within the last half hour"
    return [
        f"{name} grew by {after / before - 1:.1%} {span}"
        for name, before, after in changes
        if after > before * (1 + MAX_GROWTH)
    ]


def problems_of(samples: list[SoakSample]) -> list[str]:
    """Return what is wrong with the soak, one sentence for each problem."""
    middle = len(samples) // 2
    first, second = half_of(samples[:middle]), half_of(samples[middle:])
    problems = memory_problems(samples)
    if second.descriptors > first.descriptors + MAX_MORE_DESCRIPTORS:
        problems.append(f"descriptors grew from {first.descriptors} to {second.descriptors}")
    if second.threads > first.threads + MAX_MORE_DESCRIPTORS:
        problems.append(f"threads grew from {first.threads} to {second.threads}")
    if samples[-1].batches_lost:
        problems.append(f"{samples[-1].batches_lost} batches or events were lost")
    if samples[-1].failed_questions:
        problems.append(f"{samples[-1].failed_questions} questions failed")
    if samples[-1].failed_views:
        problems.append(f"{samples[-1].failed_views} views were not drawn")
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
        f" {samples[-1].failed_questions} questions failed; {samples[-1].views} views of the page"
    )
    if samples[-1].at_s > LEVEL_S:
        for name, (before, after) in zip(("PSS", "own"), last_half_hour(samples), strict=True):
            lines.append(
                f"last half hour: {name} {before / 2**20:.1f} MiB in its first ten minutes, {after / 2**20:.1f} in its"
                f" last: {after / before - 1:+.2%}"
            )
    return "\n".join(lines)


def main() -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvscope.lab.chaos.soak")
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--engines", type=int, default=25)
    parser.add_argument("--steps-per-s", type=float, default=5.0, help="of each engine")
    parser.add_argument("--memory-budget", default="768M", help="empty: none")
    parser.add_argument("--keep-bytes", default="2G", help="of the history")
    parser.add_argument(
        "--view-every", type=float, default=0.0, metavar="SECONDS", help="open the page so often (0: not)"
    )
    parser.add_argument("--samples", type=Path, metavar="FILE", help="also write each sample to it, as CSV")
    parsed = parser.parse_args()
    if parsed.view_every and shutil.which("chromium") is None:
        parser.error("--view-every needs a browser: apt-get install chromium")
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores: {' '.join(sys.argv[1:])}", flush=True)
    with ExitStack() as stack:
        running = running_soak(parsed.engines, parsed.steps_per_s, parsed.memory_budget, parsed.keep_bytes)
        fleet, service = stack.enter_context(running)
        views = None
        if parsed.view_every:
            views = PageViews(service.url, engine_name(0), parsed.view_every)
            stack.callback(views.close)
        samples = soak(parsed.seconds, fleet, service, parsed.engines, views, parsed.samples)
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
