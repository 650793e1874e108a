"""`monitor diff`: what got better and what got worse from one recording, or one window of it, to another."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from ...base.errors import BadTarget, CannotTell
from ...base.text import counted, duration, listed, percent, timestamp
from ...contract.wire import ContractError
from ...detectors.detector import Settings
from ...detectors.registry import parse_settings
from ...questions.comparison import WindowMeter, compare
from ...questions.observe import ALWAYS, Span, Window
from ...questions.pipeline import Pipeline
from ...questions.schema import Diff, FindingRow, MetricRow, WindowStats
from ...sources.recording import Recording, record_ns
from ...sources.targets import TargetKind, kind_of
from ..report import FINDINGS, NOTHING
from ..report_table import STYLES
from ..terminal import put_line, terminal_console, wrapped
from .shared_flags import a_time_or_length, add_thresholds, print_json


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Compares two recordings, or two windows of one: new, unchanged and resolved findings,"
        " throughput, waits, preemptions and their cost, prefix hits, block residency, and who held the"
        " pool at its peak."
    )
    parser.epilog = "exit codes: 0 no new finding of warning or above, 1 at least one, 2 wrong usage, 3 not enough data"
    parser.add_argument("before", metavar="BEFORE", help="a recording, or a file of one")
    parser.add_argument(
        "after", nargs="?", metavar="AFTER", help="another recording. Without it, two windows of BEFORE are compared"
    )
    parser.add_argument(
        "--window",
        action="append",
        default=[],
        type=_window,
        metavar="FROM..UNTIL",
        help="only this part, such as 14:02:00..14:05:00 or 10m..5m (before the end): the first of BEFORE, the"
        " second of AFTER, or both of the one. One window of one recording is compared with as long a time before it",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    add_thresholds(parser)
    parser.set_defaults(run=_run)


def _window(text: str) -> Window:
    since, dots, until = text.partition("..")
    if not dots:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window: give FROM..UNTIL, such as 14:02:00..14:05:00")
    for name in filter(None, (since, until)):
        a_time_or_length(name)
    return Window(since, until)


def _run(parsed: argparse.Namespace) -> int:
    settings = parse_settings(parsed.thresholds)
    sides = _sides(parsed.before, parsed.after, parsed.window)
    before, after = (_measured_window(target, span, settings) for target, span in sides)
    diff = compare(before, after)
    if parsed.format == "json":
        print_json(diff)
    else:
        diff_table(diff, terminal_console())
    return FINDINGS if diff.is_worse else NOTHING


def _sides(before: str, after: str | None, windows: list[Window]) -> list[tuple[str, Span]]:
    """Return the two sides of the comparison."""
    if after is not None:
        if len(windows) not in (0, 2):
            raise ValueError("of two recordings give two windows, the first of the first, or none")
        pairs = zip((before, after), windows or (ALWAYS, ALWAYS), strict=True)
        return [(target, window.span(_end_of(target))) for target, window in pairs]
    if len(windows) not in (1, 2):
        raise ValueError("give two recordings, or one and a --window FROM..UNTIL of it (or two)")
    spans = [window.span(_end_of(before)) for window in windows]
    if len(spans) == 1:
        (span,) = spans
        if not span.since_ns:
            raise ValueError("a window that is compared with the time before it needs a beginning: FROM..UNTIL")
        spans = [Span(2 * span.since_ns - span.until_ns, span.since_ns), span]
    return [(before, span) for span in spans]


def _end_of(target: str) -> int:
    if kind_of(target) is not TargetKind.RECORDING:
        raise BadTarget(f"{target} is not a recording: `monitor record TARGET DIR` makes one")
    try:
        return max(map(record_ns, Recording(Path(target))), default=0)
    except ContractError as error:
        raise CannotTell(str(error)) from error


def _measured_window(target: str, span: Span, settings: Settings) -> WindowStats:
    """Return that span of the one engine of a recording. Earlier events are folded in, and not counted."""
    watch = Pipeline(settings)
    engines = watch.fleet.engines
    measured: dict[str, WindowMeter] = {}
    for frame in Recording(Path(target)):
        if frame.wall_ns > span.until_ns:
            break
        measuring = measured.setdefault(frame.engine, WindowMeter(span.since_ns))
        measuring.look(frame, engines.get(frame.engine))
        watch.feed([frame])
        measuring.end(ended.request for ended in watch.take_ended())
    watch.settle()
    there = [name for name, measuring in measured.items() if measuring.has_begun]
    if not there:
        raise CannotTell(f"{target} has nothing from {span} UTC")
    if len(there) > 1:
        raise CannotTell(f"{target} has several engines ({', '.join(there)}): record one of them alone")
    (name,) = there
    points = [point for point in engines[name].points if span.since_ns <= point.at_ns <= span.until_ns]
    found = watch.findings(engine=name, since=timestamp(span.since_ns) or "")
    return measured[name].stats(target, engines[name], points, found)


# -------------------------------------------------------------------- how it is printed, in 80 columns


NAME_WIDTH, FIGURE_WIDTH = 34, 16
CHANGE_MARKS = {"better": "green", "worse": "bold red"}
STATUS_WORDS = {"added": "came", "unchanged": "stayed", "removed": "went"}


def diff_table(diff: Diff, console: Console) -> None:
    """Print the two sides, the findings and the numbers."""
    for name, window in (("BEFORE", diff.before), ("AFTER", diff.after)):
        put_line(console, f"{name:<7} {window.source}", "bold")
        wrapped(console, _which(window), " " * 8)
    console.print()
    put_line(console, f"FINDINGS  {_diff_tally(diff)}", "bold")
    for finding in diff.findings:
        _diff_finding(finding, console)
    console.print()
    put_line(console, f"{'FIGURES':<{NAME_WIDTH}}{'before':>{FIGURE_WIDTH}}{'after':>{FIGURE_WIDTH}}", "bold")
    for row in diff.metrics:
        if row.before is not None or row.after is not None:
            _row(row, console)
    console.print()
    worse = sum(row.change == "worse" for row in diff.metrics)
    better = sum(row.change == "better" for row in diff.metrics)
    verdict = "WORSE: a finding came." if diff.is_worse else "No new finding of warning or above."
    wrapped(console, f"{verdict} Better: {better}. Worse: {worse}.", "", "bold")


def _which(window: WindowStats) -> str:
    since, until = ((stamp or "?").replace("T", " ").replace("Z", "") for stamp in (window.since, window.until))
    return f"{window.engine}, {since} to {until} UTC, {duration(window.seconds)}"


def _diff_tally(diff: Diff) -> str:
    counts = [(word, sum(row.status == status for row in diff.findings)) for status, word in STATUS_WORDS.items()]
    return ", ".join(f"{count} {word}" for word, count in counts if count) or "none on either side"


def _diff_finding(row: FindingRow, console: Console) -> None:
    lead = f"  {STATUS_WORDS[row.status]:<7} "
    of = f": {counted(len(row.requests), 'request')}, {listed(row.requests)}" if row.requests else ""
    was = f" ({row.before} before, {row.after} after)" if row.before > 1 or row.after > 1 else ""
    style = "green" if row.status == "removed" else STYLES[row.severity]
    wrapped(console, f"{row.severity} {row.code}, {row.verdict}{was}. {row.title}{of}", lead, style)


def _row(row: MetricRow, console: Console) -> None:
    figures = "".join(f"{_diff_figure(value, row.unit):>{FIGURE_WIDTH}}" for value in (row.before, row.after))
    put_line(
        console, f"  {row.name:<{NAME_WIDTH - 2}}{figures}   {row.change}".rstrip(), CHANGE_MARKS.get(row.change, "")
    )


def _diff_figure(value: float | None, unit: str) -> str:
    if value is None:
        return "none"
    if unit == "share":
        return percent(value)
    return f"{value:,.3f} s" if unit == "s" else f"{value:,.1f} {unit}"
