"""`monitor incidents`: every fault brought about in virtual time, and what is found of it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from kvscope.monitor.commands.shared_flags import Commands
from kvscope.monitor.doctor.report import FINDINGS, NOTHING


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "incidents",
        help="every fault brought about in virtual time, and what is found of it",
        description="Brings about every incident of the catalogue that kvscope's own engine can have, in virtual time,"
        " beside healthy engines under all kinds of load, and lets the monitor judge what they say. Prints recall and"
        " precision by code, and how long findings take. Exit code 1 if anything is missed, or found that is not there."
        " It needs the engine: pip install 'kvscope[engine]'.",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="a sample: every scenario once, its clients drawn from N (0)"
    )
    parser.add_argument("--full", action="store_true", help="every scenario under five seeds, from --seed on")
    parser.add_argument(
        "--code", action="append", default=[], metavar="CODE", help="only this code's scenarios; may be repeated"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("failed-incidents"),
        metavar="DIR",
        help="where recordings of runs that were not right go (failed-incidents): monitor doctor and explain read them",
    )
    parser.add_argument("--jobs", type=int, default=0, metavar="N", help="processes (as many as there are cores)")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.incidents import lab_report
    except ModuleNotFoundError as error:
        raise ValueError(
            f"`monitor incidents` runs kvscope's own engine, which needs {error.name}: pip install 'kvscope[engine]'"
        ) from error
    seeds = range(parsed.seed, parsed.seed + (lab_report.SEEDS if parsed.full else 1))
    jobs = lab_report.jobs(seeds, parsed.code)
    runs = lab_report.do(jobs, parsed.keep, max(parsed.jobs, 0) or lab_report.cores(), Console(stderr=True))
    lab_report.show(runs, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    return FINDINGS if any(run.problems for run in runs) else NOTHING
