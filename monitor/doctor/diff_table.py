"""Formats `monitor diff`, in 80 columns."""

from __future__ import annotations

from rich.console import Console

from kvscope.monitor.doctor.report_table import STYLES
from kvscope.monitor.doctor.terminal import put_line, wrapped
from kvscope.monitor.schema import Diff, FindingRow, MetricRow, WindowStats
from kvscope.monitor.text import counted, duration, listed, percent

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
