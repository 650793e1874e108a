"""Compares two windows of engines: what improved, what got worse, and which findings came and went."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Final

import msgspec

from kvscope.monitor.analysis.request_latency import LatencyView, exact_latency
from kvscope.monitor.detectors.judgement import SEVERITIES
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.schema import SCHEMA_VERSION, Diff, FindingRow, MetricChange, MetricRow, WindowStats

THROUGHPUT: Final = ("tokens generated", "tokens computed", "requests served")
SAME_WITHIN: Final = 0.05
"""A share of the larger value: smaller differences do not count, since two runs under the same load never match
exactly.
"""


def compare(before: WindowStats, after: WindowStats) -> Diff:
    """Compare two windows. Where the engine computed nothing in the second, nothing but its throughput can be better:
    fewer preemptions of no work are not.
    """
    rows = list(_metric_rows(before, after))
    if after.computed_nothing:
        idle = [row.change == "better" and row.name not in THROUGHPUT for row in rows]
        rows = [msgspec.structs.replace(row, change="") if drop else row for row, drop in zip(rows, idle, strict=True)]
    return Diff(SCHEMA_VERSION, before, after, _finding_rows(before, after), rows)


def _finding_rows(before: WindowStats, after: WindowStats) -> list[FindingRow]:
    rows = []
    for code in dict.fromkeys(finding.code for finding in (*before.findings, *after.findings)):
        then, now = (_of_code(window, code) for window in (before, after))
        engine = (now or then)[0]
        rows.append(
            FindingRow(
                code=code,
                title=engine.title,
                severity=engine.severity,
                status="unchanged" if then and now else "added" if now else "removed",
                before=len(then),
                after=len(now),
                verdict=engine.verdict,
                requests=[name for finding in now or then for name in finding.culprits.requests],
            )
        )
    order = ("added", "unchanged", "removed")
    return sorted(rows, key=lambda row: (order.index(row.status), -SEVERITIES.index(row.severity)))


def _of_code(window: WindowStats, code: str) -> list[FindingReport]:
    return [finding for finding in window.findings if finding.code == code]


# -------------------------------------------------------------------- figures


def _metric_rows(before: WindowStats, after: WindowStats) -> Iterator[MetricRow]:
    for name, count, good in (
        ("tokens generated", "output_tokens", "up"),
        ("tokens computed", "computed_tokens", ""),
    ):
        yield _metric_row_of(name, "/s", good, (_count_rate(window, count, 1) for window in (before, after)))
    for name, count, good in (
        ("requests served", "served", "up"),
        ("requests ended otherwise", "not_served", "down"),
        ("preemptions", "preemptions", "down"),
        ("tokens lost to preemptions", "tokens_lost", "down"),
    ):
        yield _metric_row_of(name, "/min", good, (_count_rate(window, count, 60) for window in (before, after)))
    for name, part, whole, good in (
        ("recompute tax", "recomputed_tokens", "computed_tokens", "down"),
        ("prefix hit rate", "hit_tokens", "looked_up_tokens", "up"),
    ):
        yield _metric_row_of(name, "share", good, (_count_share(window, part, whole) for window in (before, after)))
    for name, part, whole in (
        ("block lifetime, mean", "lifetimes_ms", "lifetimes"),
        ("idle before eviction, mean", "idle_residencies_ms", "idle_residencies"),
    ):
        means = (_count_share(window, part, whole) for window in (before, after))
        yield _metric_row_of(name, "s", "", (None if mean is None else mean / 1e3 for mean in means))
    yield from _latency_rows("first token", *(_first_token(window) for window in (before, after)))
    yield from _latency_rows("queue time", before.queue_time, after.queue_time)
    for cause in sorted(before.waited_s.keys() | after.waited_s.keys()):
        for median in (True, False):
            row = _of_durations(
                f"waited, {cause}", median, before.waited_s.get(cause, []), after.waited_s.get(cause, [])
            )
            # If no reader waited for it, that counts as no time.
            yield msgspec.structs.replace(row, change=_change(row.before or 0.0, row.after or 0.0, "down"))
    for name, held, good in (
        ("in use at peak", ("running", "waiting", "finished", "unaccounted"), ""),
        ("held by finished at peak", ("finished",), "down"),
        ("UNACCOUNTED at peak", ("unaccounted",), "down"),
    ):
        yield _metric_row_of(name, "share", good, (_held_share(window, held) for window in (before, after)))


def _first_token(window: WindowStats) -> LatencyView | None:
    """From metrics, or of the requests that the stream has."""
    return window.first_token or exact_latency(window.time_to_first_token_s)


def _latency_rows(name: str, before: LatencyView | None, after: LatencyView | None) -> Iterator[MetricRow]:
    medians = [None if known is None else known.p50_s for known in (before, after)]
    yield _metric_row_of(f"{name}, median", "s", "down", medians)
    p95 = [None if known is None else known.p95_s for known in (before, after)]
    yield _metric_row_of(f"{name}, p95", "s", "down", p95)


def _of_durations(name: str, median: bool, before: Sequence[float], after: Sequence[float]) -> MetricRow:
    quantile, word = (0.5, "median") if median else (0.95, "p95")
    return _metric_row_of(f"{name}, {word}", "s", "down", (_quantile(each, quantile) for each in (before, after)))


def _metric_row_of(name: str, unit: str, good: str, both: Iterable[float | None]) -> MetricRow:
    before, after = both
    return MetricRow(name, unit, before, after, _change(before, after, good))


def _change(before: float | None, after: float | None, good: str) -> MetricChange:
    if before is None or after is None:
        return ""
    if abs(after - before) <= SAME_WITHIN * max(abs(before), abs(after)):
        return "same"
    if not good:
        return "differs"
    return "better" if (after > before) == (good == "up") else "worse"


def _count_rate(window: WindowStats, count: str, per_s: int) -> float | None:
    happened = window.counts.get(count)
    return happened * per_s / window.seconds if window.seconds and happened is not None else None


def _count_share(window: WindowStats, part: str, whole: str) -> float | None:
    of = window.counts.get(whole, 0)
    return window.counts.get(part, 0) / of if of else None


def _quantile(values: Sequence[float], quantile: float) -> float | None:
    """Return the least value that as large a share of them does not exceed."""
    return sorted(values)[ceil(quantile * len(values)) - 1] if values else None


def _held_share(window: WindowStats, holders: Sequence[str]) -> float | None:
    peak = window.peak
    if peak is None and len(holders) > 1:
        return window.peak_usage
    usable = peak.total - peak.reserved if peak is not None else 0
    return sum(getattr(peak, holder) for holder in holders) / usable if usable else None
