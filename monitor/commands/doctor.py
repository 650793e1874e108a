"""`monitor doctor`: what is wrong, and what to do."""

from __future__ import annotations

import argparse
from typing import Final

from rich.console import Console

from monitor.commands.common import TARGETS, Commands, add_shared, default_url, length, print_json
from monitor.detectors.thresholds import Settings
from monitor.doctor import render
from monitor.doctor.report import SINCE_S, examine

EXIT_CODES: Final = """\
exit codes
  0  nothing at or above the bar that --fail-on sets
  1  findings at or above it
  2  the command line, or a target on it, is wrong
  3  cannot tell: a target does not answer, or the evidence is not in it (what is missing is named)
  of several targets, 2 counts before 1 before 3 before 0
"""


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong, and what to do",
        description="Looks at engines and says what is wrong with their KV memory, why, and what to do.",
        epilog=f"{TARGETS}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to look at; several at once are fine")
    parser.add_argument(
        "--format", choices=("table", "short", "json", "markdown"), default="table", help="(default: table)"
    )
    parser.add_argument(
        "--fail-on", choices=("error", "warning", "never"), default="warning", help="the bar for exit code 1 (warning)"
    )
    parser.add_argument(
        "--prometheus", action="append", default=[], metavar="URL",
        help="look at what this Prometheus server stored of engines, such as http://127.0.0.1:9090; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--since", type=length, default=SINCE_S, metavar="AGO", help="how far back to look there: 30m, 2h, 1d12h (2h)"
    )
    add_shared(parser)
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    report = examine(
        parsed.targets or ([] if parsed.prometheus else [default_url()]),
        Settings.parse(parsed.thresholds),
        timeout_s=parsed.timeout,
        watch_s=parsed.watch_s,
        token=parsed.token,
        prometheus=parsed.prometheus,
        since_s=parsed.since,
    )
    if parsed.format == "json":
        print_json(report)
    else:
        _RENDERERS[parsed.format](report, Console(highlight=False))
    return report.exit_code(parsed.fail_on)


_RENDERERS = {"table": render.table, "short": render.short, "markdown": render.markdown}
