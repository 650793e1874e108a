"""blind.metric-wrong: a usage below 0, one gauge for each process, or two sizes of one pool."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from ...contract.samples import ReportedEvent
from ..detector import Threshold
from ..judgement import Evidence, TextJudgement
from ..written.written_view import TextDetector, WrittenView, number_of, quotes

ROUNDING: Final = Threshold(
    0.05, "of the pool", "the engine rounds its concurrency to two decimals and its pool to whole blocks"
)
"""A threshold of blind.metric-wrong."""
METRIC_WRONG: Final = "blind.metric-wrong"


def impossible_usage(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a share of the pool that is below 0 or above 1."""
    rounding = view.settings(ROUNDING)
    lines = [line for line in _usage_reads(view) if not 0 <= (number_of(line, "value") or 0) <= 1 + rounding]
    if not lines:
        return
    value = number_of(lines[0], "value") or 0.0
    yield view.finding(
        METRIC_WRONG,
        position=lines[0].position,
        evidence=(Evidence("usage", value, "of the pool", "metrics", lines[0].position), *quotes(lines)),
        explanation=(
            f"Usage is given as {value:.4g}, and a share of a pool is between 0 and 1. The counter of free blocks and"
            " the size of the pool do not belong together: the metric is wrong, or blocks were freed twice"
            " (corrupt.counter-drift)."
        ),
        case="A usage below 0 or above 1",
        missing="which of the two is wrong: an audit of the blocks by the event stream of a probe",
    )


def gauge_per_process(view: WrittenView) -> Iterator[TextJudgement]:
    """One engine's usage given by several processes, and not the same."""
    by_engine: dict[str, dict[str, ReportedEvent]] = {}
    for line in _usage_reads(view):
        if "pid" in line.fields:
            by_engine.setdefault(str(line.fields.get("engine", "0")), {})[str(line.fields["pid"])] = line
    for lines in by_engine.values():
        values = [number_of(line, "value") or 0.0 for line in lines.values()]
        if len(values) < 2 or max(values) - min(values) <= view.settings(ROUNDING):
            continue
        zeros = sum(value == 0 for value in values)
        yield view.finding(
            METRIC_WRONG,
            position=next(iter(lines.values())).position,
            evidence=(
                Evidence("processes", len(values), "series", "metrics"),
                Evidence("series_at_zero", zeros, "series", "metrics"),
                Evidence("highest_usage", max(values), "of the pool", "metrics"),
            ),
            explanation=(
                f"One engine's usage is exposed {len(values)} times, by process, from {min(values):.3g} to"
                f" {max(values):.3g}: only the process that the engine reports to has the current value, and the others"
                " keep their first one."
            ),
            case="One gauge for each process",
        )
        return


def sizes_disagree(view: WrittenView) -> Iterator[TextJudgement]:
    """Yield a pool whose size in tokens differs from concurrency times length."""
    tokens, times = view.number("kv_cache_size_tokens"), view.number("max_concurrency")
    each = view.number("max_concurrency_tokens")
    if (
        not tokens
        or not times
        or not each
        or abs(times * each - tokens) <= view.settings(ROUNDING) * max(tokens, times * each)
    ):
        return
    size, factor = view.facts["kv_cache_size_tokens"], view.facts["max_concurrency"]
    yield view.finding(
        METRIC_WRONG,
        position=size.position,
        evidence=(
            Evidence("kv_cache_size", round(tokens), "tokens", "log", size.position),
            Evidence("max_concurrency", times, "requests", "log", factor.position),
            Evidence("tokens_by_concurrency", round(times * each), "tokens", "log", factor.position),
        ),
        explanation=(
            f"The engine prints a pool of {tokens:,.0f} tokens and room for {times:g} requests of {each:,.0f}, which"
            f" are {times * each:,.0f}. On models with several kinds of layers the first number assumes one kind: the"
            " concurrency is the one to plan with."
        ),
        case="Two sizes of one pool",
    )


def _usage_reads(view: WrittenView) -> list[ReportedEvent]:
    return [line for line in view.reported.of("metric_read") if "cache_usage_perc" in str(line.fields.get("metric"))]


class MetricWrong(TextDetector):
    """Numbers that cannot be right.

    Sees: a usage below 0 or above 1, one engine's usage from several processes, or two sizes of one pool.
    Likely when: always, since the text does not show which number is wrong.
    Not when: they differ by rounding.
    """

    code = "blind.metric-wrong"
    severity = "info"
    title = "A metric or a log line contradicts itself"
    outlasts_epoch = True

    rounding = ROUNDING

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """Yield the first contradiction: one finding reports that the text's numbers contradict each other."""
        rules = (impossible_usage, gauge_per_process, sizes_disagree)
        yield from islice((judged for rule in rules for judged in rule(view)), 1)
