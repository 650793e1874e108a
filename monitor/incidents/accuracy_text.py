"""The tables of a batch of trials: for a terminal, and as a page of the docs."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from kvscope.monitor.confidence_bounds import Bounds
from kvscope.monitor.incidents.accuracy import LARGE_HARM, Accuracy, CodeRecall

Rows = list[list[str]]


def show_accuracy(accuracy: Accuracy, console: Console) -> None:
    """Print all tables."""
    for title, head, rows in accuracy_tables(accuracy):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in extent(accuracy):
        console.print(line, soft_wrap=True)


def accuracy_page(accuracy: Accuracy, measured: str) -> str:
    """Return the tables as Markdown. measured: what was measured, and how."""
    parts = ["# Accuracy, measured", "", measured, ""]
    parts += [f"- {line}" for line in extent(accuracy)]
    for title, head, rows in accuracy_tables(accuracy):
        parts += ["", f"## {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        parts += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(parts) + "\n"


def extent(accuracy: Accuracy) -> list[str]:
    """Return how much was run, in a few lines."""
    short = accuracy.short_steps / accuracy.steps if accuracy.steps else 0.0
    turns = (
        "Each fault was drawn equally often (--per-fault), and no engine without one: recall is comparable with other"
        " draws, and the shares of right verdicts are those of this mix of faults only"
    )
    return [
        *([turns] if accuracy.by_fault else []),
        f"{accuracy.trials} drawn runs, {accuracy.healthy_trials} of them without a fault, {accuracy.failed} failed to"
        f" run, {accuracy.unfinished} did not finish in time",
        f"{accuracy.hours:.1f} engine-hours in which a request ran or waited, {accuracy.healthy_hours:.1f} of them"
        " healthy",
        f"{accuracy.steps:,} steps, {100 * short:.0f} % of them shorter than 50 ms",
    ]


def accuracy_tables(accuracy: Accuracy) -> Iterator[tuple[str, list[str], Rows]]:
    """Yield each table: its title, its head and its rows."""
    yield (
        "False findings in healthy engines",
        ["source", "code", "findings", "per engine-hour", "95 % bounds", "runs"],
        [
            [
                each.source,
                each.code or "all",
                str(each.findings),
                f"{each.per_hour:.2f}",
                f"{each.bounds.low:.2f} to {each.bounds.high:.2f}",
                " ".join(map(str, each.trials[:6])) if each.code else "",
            ]
            for each in accuracy.false_rates
        ],
    )
    yield (
        "Findings that are right, by verdict",
        ["source", "verdict", "right", "share", "95 % bounds"],
        [
            [
                each.source,
                each.verdict,
                f"{each.right} of {each.findings}",
                f"{each.right / each.findings:.3f}" if each.findings else "–",
                _bounds(each.bounds),
            ]
            for each in accuracy.verdicts
        ],
    )
    by_source = {source: [each for each in accuracy.recalls if each.source == source] for source in ("stream",)}
    for source, recalls in by_source.items():
        yield (
            f"Recall from the {source}",
            [
                "code",
                "found",
                "95 % bounds",
                f"large (≥ {LARGE_HARM:.0%})",
                "95 % bounds",
                "otherwise",
                "median",
                "p90",
            ],
            [_recall_row(each) for each in recalls],
        )
    codes = sorted({each.code for each in accuracy.recalls} | accuracy.reach.keys())
    yield (
        "Reach: codes that were rightly found at least once",
        ["code", "stream", "metrics"],
        [
            [code, *("yes" if source in accuracy.reach.get(code, []) else "–" for source in ("stream", "metrics"))]
            for code in codes
        ],
    )


def _bounds(bounds: Bounds) -> str:
    return f"{bounds.low:.2f} to {bounds.high:.2f}"


def _recall_row(each: CodeRecall) -> list[str]:
    return [
        each.code,
        f"{each.found} of {each.trials}",
        _bounds(each.recall_bounds),
        f"{each.large_found} of {each.large}",
        _bounds(each.large_bounds) if each.large else "–",
        str(each.otherwise),
        f"{each.median_s:.1f} s" if each.median_s is not None else "–",
        f"{each.p90_s:.1f} s" if each.p90_s is not None else "–",
    ]
