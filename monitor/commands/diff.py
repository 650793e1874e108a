"""`monitor diff`: what got better and what got worse from one recording, or one window of it, to another."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvscope.monitor.commands.shared_flags import Commands, add_thresholds, print_json
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.doctor.diff_table import diff_table
from kvscope.monitor.doctor.report import FINDINGS, NOTHING
from kvscope.monitor.doctor.terminal import terminal_console
from kvscope.monitor.doctor.time_window import ALWAYS, Span, Window, when
from kvscope.monitor.errors import BadTarget, CannotTell
from kvscope.monitor.events.wire import ContractError
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.queries.comparison import compare
from kvscope.monitor.queries.window_stats import WindowMeter
from kvscope.monitor.schema import WindowStats
from kvscope.monitor.sources.recording import Recording, record_ns
from kvscope.monitor.sources.targets import TargetKind, kind_of
from kvscope.monitor.text import timestamp


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "diff",
        help="compare two recordings, or two windows of one",
        description="Compares two recordings, or two windows of one: new, unchanged and resolved findings,"
        " throughput, waits, preemptions and their cost, prefix hits, block residency, and who held the"
        " pool at its peak.",
        epilog="exit codes: 0 no new finding of warning or above, 1 at least one, 2 wrong usage, 3 not enough data",
    )
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
    try:
        for name in filter(None, (since, until)):
            when(name, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
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
