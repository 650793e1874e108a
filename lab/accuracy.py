"""The results of trials: recall, right and wrong verdicts, false findings per healthy hour, time to finding, reach.

show_accuracy prints them as tables, and accuracy_page writes them as Markdown.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from kvscope.monitor.base.confidence_bounds import Bounds, rate_bounds, share_bounds

from .suffering import Suffering
from .trial import TRIAL_SOURCES, HarmSeen, SourceResult, Trial

LARGE_HARM: Final = 0.01
"""A harm of one hundredth of the pool, the requests, the work or the time counts as a large one."""
WATCHED_AFTER_S: Final = 60.0
"""A harm counts for recall if it was found, or if the engine was watched for this long after it began."""
CLAIM_VERDICTS: Final = ("confirmed", "likely", "cannot-tell")


class CodeRecall(msgspec.Struct):
    """The recall of one code from one source: trials with its harm, those in which it was found, and the same of large
    harms.

    otherwise: another code that the harm makes true was found instead. seconds: from the harm's beginning to the
    finding, median and nine in ten.
    """

    code: str
    source: str
    trials: int
    found: int
    recall_bounds: Bounds
    large: int
    large_found: int
    large_bounds: Bounds
    otherwise: int
    median_s: float | None
    p90_s: float | None


class VerdictShare(msgspec.Struct):
    """Findings of one verdict from one source, and how many are right."""

    source: str
    verdict: str
    right: int
    findings: int
    bounds: Bounds


class FalseRate(msgspec.Struct):
    """False findings in healthy engines from one source. An empty code means all codes together."""

    source: str
    code: str
    findings: int
    hours: float
    per_hour: float
    bounds: Bounds
    trials: list[int]


class Accuracy(msgspec.Struct):
    """The accuracy over a batch of trials. Hours are those in which a request ran or waited.

    by_fault: each fault had its turn, so that recall is comparable with other draws, and shares of verdicts are not.
    changed: the rows of trials whose engine's behaviour was changed at random.
    failed: trials that could not be run. unfinished: those that took too long. Neither counts for anything else.
    """

    trials: int
    failed: int
    healthy_trials: int
    hours: float
    healthy_hours: float
    steps: int
    short_steps: int
    recalls: list[CodeRecall]
    verdicts: list[VerdictShare]
    false_rates: list[FalseRate]
    reach: dict[str, list[str]]
    wrong_trials: list[int]
    unfinished: int = 0
    by_fault: bool = False
    changed: list[list[str]] = []


def accuracy_of(trials: Sequence[Trial]) -> Accuracy:
    """Add the trials up. Trials that could not run are only counted."""
    ran = [trial for trial in trials if not trial.error]
    healthy = [trial for trial in ran if trial.healthy]
    return Accuracy(
        trials=len(trials),
        failed=sum(bool(trial.error) and trial.finished for trial in trials),
        healthy_trials=len(healthy),
        hours=sum(trial.busy_s for trial in ran) / 3600,
        healthy_hours=sum(trial.busy_s for trial in healthy) / 3600,
        steps=sum(trial.steps for trial in ran),
        short_steps=sum(trial.short_steps for trial in ran),
        recalls=[*_recalls(ran)],
        verdicts=[*_verdicts(ran)],
        false_rates=[*_false_rates(healthy)],
        reach=_reached_codes(ran),
        wrong_trials=[
            trial.number
            for trial in ran
            if any(not claim.right for result in trial.results.values() for claim in result.claims)
        ],
        unfinished=sum(not trial.finished for trial in trials),
        by_fault=any(trial.by_fault for trial in trials),
        changed=[_changed_row(trial, trial.suffering) for trial in ran if trial.suffering is not None],
    )


def _changed_row(trial: Trial, suffering: Suffering) -> list[str]:
    return [
        str(trial.number),
        suffering.mutation,
        str(len(suffering.requests)),
        str(len(suffering.unnamed)),
        f"{suffering.held:.0%}",
        "SILENT"
        if suffering.silent
        else "; ".join(
            f"{claim.code} {claim.verdict} {claim.at_s:.0f} s{'' if claim.right else ' (' + claim.wrong_because + ')'}"
            for claim in _of(trial, "stream").claims
        ),
    ]


def _of(trial: Trial, source: str) -> SourceResult:
    return trial.results.get(source) or SourceResult()


def _recalls(trials: Sequence[Trial]) -> Iterator[CodeRecall]:
    for source in TRIAL_SOURCES:
        harms = [
            harm
            for trial in trials
            for harm in _of(trial, source).harms
            if harm.found_s is not None or harm.left_s >= WATCHED_AFTER_S
        ]
        for code in sorted({harm.code for harm in harms}):
            yield _recall(code, source, [harm for harm in harms if harm.code == code])


def _recall(code: str, source: str, harms: Sequence[HarmSeen]) -> CodeRecall:
    found = [harm for harm in harms if harm.found_s is not None]
    large = [harm for harm in harms if harm.size >= LARGE_HARM]
    large_found = sum(harm.found_s is not None for harm in large)
    took = sorted(harm.found_s - harm.since_s for harm in found if harm.found_s is not None)
    return CodeRecall(
        code,
        source,
        len(harms),
        len(found),
        share_bounds(len(found), len(harms)),
        len(large),
        large_found,
        share_bounds(large_found, len(large)),
        sum(harm.found_s is None and bool(harm.also) for harm in harms),
        statistics.median(took) if took else None,
        took[min(len(took) - 1, int(0.9 * len(took)))] if took else None,
    )


def _verdicts(trials: Sequence[Trial]) -> Iterator[VerdictShare]:
    for source in TRIAL_SOURCES:
        claims = [claim for trial in trials for claim in _of(trial, source).claims]
        for verdict in CLAIM_VERDICTS:
            of_it = [claim for claim in claims if claim.verdict == verdict]
            right = sum(claim.right for claim in of_it)
            yield VerdictShare(source, verdict, right, len(of_it), share_bounds(right, len(of_it)))


def _false_rates(healthy: Sequence[Trial]) -> Iterator[FalseRate]:
    hours = sum(trial.busy_s for trial in healthy) / 3600
    for source in TRIAL_SOURCES:
        wrong = [
            (claim.code, trial.number) for trial in healthy for claim in _of(trial, source).claims if not claim.right
        ]
        codes = sorted({code for code, _ in wrong}, key=lambda code: -sum(other == code for other, _ in wrong))
        for code in ("", *codes):
            numbers = [number for other, number in wrong if code in ("", other)]
            rate = len(numbers) / hours if hours else 0.0
            bounds = rate_bounds(len(numbers), hours)
            yield FalseRate(source, code, len(numbers), hours, rate, bounds, sorted(set(numbers))[:20])


def _reached_codes(trials: Sequence[Trial]) -> dict[str, list[str]]:
    """Return the sources from which each code was rightly found at least once."""
    reached: dict[str, dict[str, None]] = {}
    for trial in trials:
        for source in TRIAL_SOURCES:
            for claim in _of(trial, source).claims:
                if claim.right:
                    reached.setdefault(claim.code, {})[source] = None
    return {code: list(reached[code]) for code in sorted(reached)}


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
    if accuracy.changed:
        yield "Behaviour changed at random", ["run", "change", "suffer", "unnamed", "held", "found"], accuracy.changed
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
