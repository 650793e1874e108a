"""Many runs, over all cores, and the figures over them: recall and precision by code, and how long findings take."""

from __future__ import annotations

import logging
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvscope.monitor.detectors.registry import CATALOGUE

from .lab_run import LabRun, live
from .scenarios import INCIDENTS, SCENARIOS, SHOWN_BY_HAND

SEEDS: Final = 5
"""Seeds of a full matrix."""


class Job(NamedTuple):
    """A scenario, by its place in SCENARIOS, under a seed."""

    place: int
    seed: int


def jobs(seeds: Sequence[int], codes: Sequence[str] = ()) -> list[Job]:
    """Return every scenario under every seed, restricted to these codes, if any are given.

    Raises ValueError for a code that no scenario causes.
    """
    known = {scenario.code for scenario in SCENARIOS}
    for code in codes:
        if code not in known - {""}:
            raise ValueError(f"--code {code}: no scenario causes it. There are {', '.join(sorted(known - {''}))}")
    wanted = [place for place, scenario in enumerate(SCENARIOS) if not codes or scenario.code in codes]
    return [Job(place, seed) for seed in seeds for place in wanted]


def do(wanted: Sequence[Job], keep: Path | None, processes: int, console: Console) -> list[LabRun]:
    """Run them all, over that many processes, with a bar on `console`, in the order of `wanted`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # A process of its own begins with no threads of ours, as forks of torch would.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(processes, mp_context=context, initializer=logging.disable) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("incidents", total=len(wanted))
        places = {pool.submit(_do, job, keep): place for place, job in enumerate(wanted)}
        made: dict[int, LabRun] = {}
        for future in as_completed(places):
            made[places[future]] = future.result()
            wrong = sum(bool(each.problems) for each in made.values())
            progress.update(bar, advance=1, description=f"incidents, {wrong} not as they should be" if wrong else None)
    return [made[place] for place in sorted(made)]


def _do(job: Job, keep: Path | None) -> LabRun:
    return live(SCENARIOS[job.place], job.seed, keep)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -------------------------------------------------------------------- figures


class Figures(NamedTuple):
    """The results of one code, over the runs that caused it and those that did not."""

    code: str
    runs: int
    found: int
    false: int
    """Runs in which it was found and is neither the cause nor a consequence of it."""
    right: int
    """Runs with nothing to object to, the culprits included."""
    seconds: list[float]
    """From onset to finding beyond the class's own grace, of each run that found it."""
    steps: list[int]
    grace_s: float

    @property
    def recall(self) -> float:
        """The share of its runs in which it was found."""
        return self.found / self.runs if self.runs else 1.0

    @property
    def precision(self) -> float:
        """The share of its findings that were right."""
        return self.found / (self.found + self.false) if self.found + self.false else 1.0


def figures(runs: Sequence[LabRun]) -> list[Figures]:
    """By code, in the table's order."""
    consequences = {scenario.name: scenario.consequences for scenario in SCENARIOS}
    made = []
    for code in dict.fromkeys(run.code for run in runs if run.code):
        own = [run for run in runs if run.code == code]
        found = [run for run in own if run.found is not None]
        others = [run for run in runs if run.code != code and code not in consequences[run.scenario]]
        made.append(
            Figures(
                code,
                len(own),
                len(found),
                sum(any(fired.code == code for fired in run.fired) for run in others),
                sum(not run.problems for run in own),
                [run.took_s - run.grace_s for run in found if run.took_s is not None],
                [run.took_steps for run in found if run.took_s is not None],
                max((run.grace_s for run in own), default=0.0),
            )
        )
    return made


def show(runs: Sequence[LabRun], console: Console) -> None:
    """Print the figures, what was found of what, and what was not as it should be."""
    by_code = Table()
    by_code.add_column("code", no_wrap=True)
    for name in ("runs", "recall", "precision", "all right", "own grace", "median beyond", "most", "steps"):
        by_code.add_column(name, justify="right")
    for each in figures(runs):
        by_code.add_row(
            each.code,
            str(each.runs),
            f"{each.recall:.3f}",
            f"{each.precision:.3f}",
            f"{each.right}/{each.runs}",
            f"{each.grace_s:g} s",
            *((f"{statistics.median(each.seconds):.1f} s", f"{max(each.seconds):.1f} s") if each.seconds else "––"),
            f"{statistics.median(each.steps):.0f}" if each.steps else "–",
        )
    if by_code.rows:
        console.print(by_code)
    for line in summary(runs):
        console.print(line, soft_wrap=True)
    confused = Table("caused", "found", "runs", title="What was found of what", title_justify="left")
    pairs = Counter(
        (run.code or "nothing", code)
        for run in runs
        for code in sorted({fired.code for fired in run.fired} or {"nothing"})
    )
    for (caused, found), count in pairs.items():
        confused.add_row(caused, found, str(count))
    console.print(confused)
    for run in runs:
        if run.problems:
            console.print(f"{run.scenario}, seed {run.seed}:", *run.problems, sep="\n  ", markup=False, soft_wrap=True)
            if run.kept:
                console.print(f"  kept in {run.kept}", markup=False, soft_wrap=True)


def summary(runs: Sequence[LabRun]) -> list[str]:
    """Return a summary in a few lines."""
    incidents = [run for run in runs if run.code]
    healthy = [run for run in runs if not run.code]
    beyond = [run.took_s - run.grace_s for run in incidents if run.took_s is not None]
    wrong = sum(bool(run.problems) for run in runs)
    lines = [
        f"{len(incidents)} incidents of {len({run.code for run in incidents})} codes, {len(healthy)} healthy runs of"
        f" {len({run.scenario for run in healthy})} shapes: {sum(run.virtual_s for run in runs) / 3600:.1f} hours of"
        f" engine time in {sum(run.real_s for run in runs) / 60:.1f} minutes of one core",
        f"{wrong} runs not as they should be; {sum(bool(run.fired) for run in healthy)} healthy ones with a finding of"
        " warning or above",
    ]
    if beyond:
        lines.append(f"from onset to finding, beyond the class's own grace: median {statistics.median(beyond):.2f} s")
    caused = {scenario.code for scenario in INCIDENTS}
    lines.append(
        f"{len(CATALOGUE.keys() - caused)} codes of the catalogue's {len(CATALOGUE)} are not counted here, since the"
        f" engine has no such part: tests with streams written by hand show {', '.join(SHOWN_BY_HAND)}"
    )
    return lines
