""""""

from __future__ import annotations

import gc
import logging
import multiprocessing
from collections.abc import Collection, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvscope.monitor.base.process_limits import collect_rarely

from .drain_limits import LAB_THRESHOLDS
from .episode import DrawnFrom
from .trial import Trial, run_trial

TRIALS_FILE: Final = "trials.jsonl"


def read_trials(directory: Path, seed: int, engine: str, drawn_from: DrawnFrom = "all") -> dict[int, Trial]:
    """Return the trials of this seed, engine and kind that `directory` has, by number.

    A last line that was cut short is left out.
    """
    path = directory / TRIALS_FILE
    found: dict[int, Trial] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            trial = msgspec.json.decode(line, type=Trial)
        except msgspec.DecodeError:
            continue
        if (trial.seed, trial.engine, trial.drawn_from) == (seed, engine, drawn_from):
            found[trial.number] = trial
    return found


def run_trials(
    numbers: Sequence[int],
    seed: int,
    engine: str,
    directory: Path | None,
    processes: int,
    console: Console,
    limit_s: float = 0.0,
    drawn_from: DrawnFrom = "all",
) -> list[Trial]:
    """Run those trials that `directory` does not have yet, add them to it, and return all in order of their numbers.

    limit_s, drawn_from: see run_trial.
    """
    done = read_trials(directory, seed, engine, drawn_from) if directory is not None else {}
    left = [number for number in numbers if number not in done]
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
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
        ProcessPoolExecutor(processes, mp_context=context, initializer=_begin_worker) as pool,
        Progress(*columns, console=console) as progress,
    ):
        bar = progress.add_task("trials", total=len(numbers), completed=len(numbers) - len(left))
        futures = [pool.submit(_run_and_collect, number, seed, engine, None, limit_s, drawn_from) for number in left]
        for future in as_completed(futures):
            trial = future.result()
            done[trial.number] = trial
            if directory is not None:
                with (directory / TRIALS_FILE).open("ab") as file:
                    file.write(msgspec.json.encode(trial) + b"\n")
            progress.update(bar, advance=1, description=_progress_text(done.values()))
    return [done[number] for number in numbers]


def _begin_worker() -> None:
    logging.disable()
    collect_rarely(LAB_THRESHOLDS)


def _run_and_collect(*arguments: Any) -> Trial:
    """Run a trial as `run_trial` does, and free its engine and ledger."""
    trial = run_trial(*arguments)
    gc.collect()
    return trial


def _progress_text(trials: Collection[Trial]) -> str:
    steps, hours = sum(trial.steps for trial in trials), sum(trial.busy_s for trial in trials) / 3600
    left_out = sum(bool(trial.error) for trial in trials)
    return f"trials: {steps:,} steps, {hours:.1f} engine-hours" + (f", {left_out} not counted" if left_out else "")
