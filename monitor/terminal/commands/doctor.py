"""`monitor doctor`: what is wrong, and what to do."""

from __future__ import annotations

import argparse
import time
from typing import Final

import msgspec

from ...base.text import clock_time, escaped, escaped_json
from ...detectors.findings import severity_at_least
from ...detectors.registry import parse_settings
from .. import report_table
from ..report import FINDINGS, NOTHING, examine
from ..terminal import terminal_console, wrapped
from ..watch_mode import Change, look_on
from .shared_flags import add_shared, add_window, default_url, print_json, target_help, window_of

EXIT_CODES: Final = """\
exit codes
  0  no finding at or above the severity of --fail-on
  1  at least one such finding
  2  the command line, or a target on it, is wrong
  3  no judgement: a target does not answer or lacks evidence (the output names what is missing), or its words alone
     give hypotheses
  with several targets, 2 takes precedence over 1, then 3, then 0
"""


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Inspects engines and reports problems with their KV cache memory, their causes, and what to do."
    )
    parser.epilog = f"{target_help()}\n{EXIT_CODES}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to inspect (repeatable)")
    parser.add_argument(
        "--format", choices=("table", "short", "json", "markdown"), default="table", help="(default: table)"
    )
    parser.add_argument(
        "--fail-on",
        choices=("error", "warning", "never"),
        default="warning",
        help="lowest severity that gives exit code 1 (default: warning)",
    )
    parser.add_argument(
        "--prometheus",
        action="append",
        default=[],
        metavar="URL",
        help="inspect what this Prometheus server stored about engines, by default the last 2 h, such as"
        " http://127.0.0.1:9090 (repeatable)",
    )
    add_window(parser)
    parser.add_argument(
        "--watch",
        action="store_true",
        help="watch until Ctrl-C and print when a finding fires, grows or resolves. The exit code reflects the last"
        " state, and JSON has one line for each change",
    )
    add_shared(parser)
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    if parsed.watch:
        return _watch_targets(parsed)
    report = examine(
        parsed.targets or ([] if parsed.prometheus else [default_url()]),
        parse_settings(parsed.thresholds),
        timeout_s=parsed.timeout,
        watch_s=parsed.watch_s,
        token=parsed.token,
        prometheus=parsed.prometheus,
        window=window_of(parsed),
    )
    if parsed.format == "json":
        print_json(report)
    else:
        _RENDERERS[parsed.format](report, terminal_console())
    return report.exit_code(parsed.fail_on)


def _watch_targets(parsed: argparse.Namespace) -> int:
    if parsed.since or parsed.until or parsed.prometheus:
        raise ValueError("--watch starts now: --since, --until and --prometheus inspect the past")
    if parsed.format not in ("table", "json"):
        raise ValueError(f"--watch prints lines, or JSON with --format json, and has no --format {parsed.format}")
    console, errors = terminal_console(), terminal_console(stderr=True)

    def report_change(change: Change) -> None:
        if parsed.format == "json":
            print(escaped_json(msgspec.json.encode(change).decode()), flush=True)
        else:
            report_table.change(change, console)

    with console.status("", refresh_per_second=1) as status:
        fired = look_on(
            parsed.targets or [default_url()],
            parse_settings(parsed.thresholds),
            timeout_s=parsed.timeout,
            token=parsed.token,
            report_change=report_change,
            note=lambda text: wrapped(errors, text, f"{clock_time(time.time_ns())} "),
            beat=lambda text: status.update(escaped(text)),
        )
    bar = parsed.fail_on
    return FINDINGS if bar != "never" and any(severity_at_least(f.severity, bar) for f in fired) else NOTHING


_RENDERERS = {"table": report_table.report_table, "short": report_table.short, "markdown": report_table.markdown}
