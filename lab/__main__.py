"""`python -m kvscope.lab`: draw engines at random, run them in virtual time, and compare findings with the truth."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console

from kvscope.monitor.terminal.cli import INTERRUPTED_EXIT
from kvscope.monitor.terminal.report import FINDINGS, NOTHING, USAGE
from kvscope.monitor.terminal.terminal import terminal_console

from . import lab_report
from .accuracy import accuracy_of, accuracy_page, show_accuracy
from .episode import ENGINE_NAMES, DrawnFrom, faults_in_turn
from .new_code import new_code
from .on_vllm.fault_table import RANDOM_MUTATION
from .on_vllm.vllm_worker import VLLM_PYTHON, VLLM_RELEASE, VllmWorker
from .trial import run_trial
from .trial_batch import run_trials

PROGRAM: Final = "python -m kvscope.lab"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the lab with these arguments (default: those of the process) and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return new_code(given[1:]) if given[:1] == ["new-code"] else _run(_parser().parse_args(given))
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Draws engines, loads and faults at random from the range that people run, runs them in virtual"
        " time, and compares what the monitor finds with what really happened: requests that would never finish, blocks"
        " that would never be freed, work done twice, time lost, decided from the engine's own state. Prints recall by"
        " code, the share of verdicts that are right, and false findings for each healthy engine-hour, with 95 %"
        " bounds. With --scenarios, runs the fixed table of faults instead and exits with 1 if one is missed. `new-code"
        " CODE` writes the files of a new finding code.",
    )
    parser.add_argument("--runs", type=int, default=40, metavar="N", help="how many runs to draw (default: 40)")
    parser.add_argument(
        "--engine",
        default="own",
        metavar="ENGINE",
        help="the engine under test, in virtual time: own for kvscope's engine, vllm for vLLM's scheduler with the"
        " probe, own-ranks or vllm-ranks for servers of 2 to 4 data-parallel ranks of either (own)",
    )
    _add_vllm_flags(parser)
    _add_draw_flags(parser)
    parser.add_argument("--first", type=int, default=0, metavar="RUN", help="number of the first run (default: 0)")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="write the outcome of each run to DIR, and skip the runs that it has already",
    )
    parser.add_argument(
        "--explain", type=int, metavar="RUN", help="run only this one, print the truth and keep its recording (--keep)"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the tables to FILE as Markdown, and as JSON beside it"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all random choices (default: 0)")
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("failed-incidents"),
        metavar="DIR",
        help="directory for recordings, which monitor doctor and explain read (default: failed-incidents)",
    )
    parser.add_argument(
        "--run-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="real seconds after which a run is reported as unfinished. 0 sets no limit (default: 600)",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (default: the number of cores)")
    _add_scenario_flags(parser)
    return parser


def _add_scenario_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenarios", action="store_true", help="run every scenario of the fixed table once")
    parser.add_argument(
        "--full", action="store_true", help="with --scenarios: run each with five seeds, starting with --seed"
    )
    parser.add_argument(
        "--code",
        action="append",
        default=[],
        metavar="CODE",
        help="with --scenarios: only the scenarios of this code (repeatable)",
    )


def _add_draw_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--healthy",
        action="store_true",
        help="draw only engines without a fault, and watch each for up to an hour or 50,000 steps",
    )
    parser.add_argument(
        "--per-fault",
        type=int,
        default=0,
        metavar="N",
        help="instead of --runs: draw N runs of each fault in turn, and none without a fault",
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="FAULT",
        help="with --per-fault: only the runs with this fault (repeatable)",
    )


def _add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vllm-python", metavar="PYTHON", help="with --engine vllm: the Python that has vLLM (KVSCOPE_LAB_VLLM)"
    )
    parser.add_argument(
        "--release",
        metavar="DIR",
        help="with --engine vllm: a folder with the Python files of another release, and `deps` beside it"
        " (KVSCOPE_LAB_VLLM_RELEASE)",
    )


def _run(parsed: argparse.Namespace) -> int:
    processes = max(parsed.jobs, 0) or lab_report.cores()
    console = terminal_console(width=None if sys.stdout.isatty() else 140)
    if parsed.engine not in ENGINE_NAMES:
        raise ValueError(f"--engine {parsed.engine}: there are {', '.join(ENGINE_NAMES)}")
    if parsed.engine.startswith("vllm"):
        parsed.engine = _engine_of_release(parsed)
    if parsed.explain is not None:
        return _explain_trial(parsed, console)
    if not (parsed.scenarios or parsed.full or parsed.code):
        return _draw_trials(parsed, processes, console)
    seeds = range(parsed.seed, parsed.seed + (lab_report.SEEDS if parsed.full else 1))
    jobs = lab_report.jobs(seeds, parsed.code)
    runs = lab_report.do(jobs, parsed.keep, processes, terminal_console(stderr=True))
    lab_report.show(runs, console)
    return FINDINGS if any(run.problems for run in runs) else NOTHING


def _engine_of_release(parsed: argparse.Namespace) -> str:
    """Hand the flags to the processes of the lab, and return the engine's name with vLLM's release."""
    for variable, value in ((VLLM_PYTHON, parsed.vllm_python), (VLLM_RELEASE, parsed.release)):
        if value:
            os.environ[variable] = value
    if not os.environ.get(VLLM_PYTHON):
        raise ValueError(f"--engine vllm needs a Python that has vLLM: --vllm-python PYTHON, or {VLLM_PYTHON}")
    worker = VllmWorker(os.environ[VLLM_PYTHON], os.environ.get(VLLM_RELEASE, ""))
    worker.close()
    return f"{parsed.engine} {worker.release}"


def _draw_trials(parsed: argparse.Namespace, processes: int, console: Console) -> int:
    numbers = _run_numbers(parsed)
    trials = run_trials(
        numbers,
        parsed.seed,
        parsed.engine,
        parsed.resume,
        processes,
        terminal_console(stderr=True),
        parsed.run_seconds,
        _drawn_from(parsed),
    )
    accuracy = accuracy_of(trials)
    show_accuracy(accuracy, console)
    if parsed.write is not None:
        parsed.write.parent.mkdir(parents=True, exist_ok=True)
        engine = parsed.engine.partition(" ")[0]
        count = f"--per-fault {parsed.per_fault}" if parsed.per_fault else f"--runs {parsed.runs}"
        flags = f"--engine {engine} --first {parsed.first} {count} --seed {parsed.seed}"
        flags += " --healthy" if parsed.healthy else "".join(f" --fault {name}" for name in parsed.fault)
        parsed.write.write_text(accuracy_page(accuracy, f"`{PROGRAM} {flags}`, on {parsed.engine}"))
        data = msgspec.json.format(msgspec.json.encode(accuracy), indent=1)
        parsed.write.with_suffix(".json").write_bytes(data + b"\n")
    return NOTHING


def _drawn_from(parsed: argparse.Namespace) -> DrawnFrom:
    return "healthy" if parsed.healthy else "faults" if parsed.per_fault else "all"


def _run_numbers(parsed: argparse.Namespace) -> Sequence[int]:
    """Return the numbers of the runs to draw."""
    if parsed.fault and not parsed.per_fault:
        raise ValueError(f"--fault {parsed.fault[0]} needs --per-fault N")
    if parsed.healthy and parsed.per_fault:
        raise ValueError("--healthy and --per-fault exclude each other")
    flag, count = ("--per-fault", parsed.per_fault) if parsed.per_fault else ("--runs", parsed.runs)
    if count < 1:
        raise ValueError(f"{flag} {count}: at least 1")
    if not parsed.per_fault:
        return range(parsed.first, parsed.first + count)
    faults = faults_in_turn(parsed.engine)
    for name in parsed.fault:
        if name not in faults:
            raise ValueError(f"--fault {name}: there are {', '.join(faults)}")
    numbers = range(parsed.first, parsed.first + count * len(faults))
    wanted = parsed.fault or [name for name in faults if name != RANDOM_MUTATION]
    return [number for number in numbers if faults[number % len(faults)] in wanted]


def _explain_trial(parsed: argparse.Namespace, console: Console) -> int:
    """Run one again, and show the truth, the findings and where its recording is."""
    keep = parsed.keep / f"run {parsed.explain}"
    trial = run_trial(parsed.explain, parsed.seed, parsed.engine, keep, drawn_from=_drawn_from(parsed))
    faults = ", ".join(trial.faults) or "no fault"
    extent = f"{trial.steps:,} steps, {trial.asked} requests, watched for {trial.watched_s:.0f} s"
    console.print(f"run {trial.number}: {faults}, {extent}", markup=False, soft_wrap=True)
    console.print(f"what happened: {', '.join(trial.kinds) or 'no harm'}", trial.error, markup=False, soft_wrap=True)
    for source, result in trial.results.items():
        for harm in result.harms:
            found = f"found after {harm.found_s - harm.since_s:.1f} s" if harm.found_s is not None else "missed"
            size = f"{100 * harm.size:.2f} %, from {harm.since_s:.1f} s on"
            console.print(f"{source}: {harm.code} ({harm.kind}, {size}): {found}", *harm.also, markup=False)
        for claim in result.claims:
            judged = "right" if claim.right else f"wrong: {claim.wrong_because}"
            console.print(f"{source}: {claim.verdict} {claim.code} at {claim.at_s:.1f} s is {judged}", markup=False)
            console.print(f"  {claim.explanation}", markup=False, soft_wrap=True)
    recordings = " ".join(repr(str(path)) for path in sorted(keep.glob("rank *")) or [keep])
    console.print(f"its recording: monitor doctor {recordings}", markup=False, soft_wrap=True)
    return FINDINGS if any(not claim.right for each in trial.results.values() for claim in each.claims) else NOTHING


if __name__ == "__main__":
    sys.exit(main())
