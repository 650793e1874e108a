"""Statistics of a window of an engine, and two windows compared.

Measured is what is folded in: of a block that was allocated before the fold begins, no lifetime is known.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import Final

import msgspec

from ..base.errors import BadTime
from ..base.latest_entries import LatestEntries
from ..base.text import duration, timestamp
from ..contract.wire import Frame, Keyframe
from ..detectors.findings import FindingReport
from ..detectors.judgement import SEVERITIES
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.records import RequestState
from ..ledger.request_latency import LatencyView, exact_latency
from ..ledger.tally import SERVED
from ..ledger.wait_graph import waited_s
from .past import Past
from .schema import SCHEMA_VERSION, Diff, FindingRow, MetricChange, MetricRow, WindowStats

MAX_WINDOW_S: Final = 3600.0
"""So long may a stretch be that is measured while others wait for answers: some seconds of a processor."""
MAX_CACHED_WINDOWS: Final = 16
YOUNG_NS: Final = 1_000_000_000
"""An engine joined later than this after its start has earlier counts, which do not belong to the window."""


class WindowMeter:
    """Measures the window of one engine that begins at `since_ns` (wall), while a caller folds its frames and passes
    each one here first, with the requests that ended by it. Earlier frames do not count.
    """

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._before: Counter[str] | None = None
        """The counts at its beginning."""
        self._earlier: Counter[str] = Counter()
        """Counts of earlier epochs, since reading began."""
        self._ended: list[RequestState] = []

    @property
    def has_begun(self) -> bool:
        """Whether anything of the stretch was there."""
        return self._before is not None

    def look(self, frame: Frame, ledger: EngineLedger | None) -> None:
        """Inspect the frame before the ledger, if there is one yet, folds it in."""
        joins = isinstance(frame, Keyframe) and (ledger is None or not ledger.ready)
        is_past = joins and frame.wall_ns - frame.epoch > YOUNG_NS
        if self._before is None and frame.wall_ns >= self._since_ns and not is_past:
            self._before = Counter() if ledger is None or self._is_whole(ledger) else self._total(ledger)
        if ledger is not None and frame.epoch > ledger.epoch:
            self._earlier.update(_counts(ledger))

    def _is_whole(self, ledger: EngineLedger) -> bool:
        """Whether all that the engine has counted so far is of the stretch."""
        return ledger.joined_ns >= self._since_ns and ledger.joined_ns - ledger.epoch <= YOUNG_NS

    def end(self, requests: Iterable[RequestState]) -> None:
        """Note the requests that ended by the last frame."""
        if self._before is not None:
            self._ended.extend(requests)

    def stats(
        self, source: str, ledger: EngineLedger, points: Iterable[Point], findings: Sequence[FindingReport]
    ) -> WindowStats:
        """All of it, until where the ledger is. `points` and `findings` are those of the stretch."""
        began_ns = max(self._since_ns, ledger.joined_ns)
        before = self._before or Counter()
        requests = [*self._ended, *(record for record in ledger.state.requests.values() if not record.is_finished)]
        peak = max(points, key=lambda point: point.balance.used, default=None)
        return WindowStats(
            source=source,
            since=timestamp(began_ns),
            until=timestamp(ledger.now_ns),
            seconds=max(ledger.now_ns - began_ns, 0) / 1e9,
            engine=ledger.engine,
            findings=list(findings),
            waited_s=_waits_by_cause(ledger, requests),
            time_to_first_token_s=[
                (record.first_token_ns - record.arrived_ns) / 1e9
                for record in requests
                if record.arrived_ns and record.first_token_ns and ledger.wall(record.first_token_ns) >= self._since_ns
            ],
            counts={name: count - before[name] for name, count in self._total(ledger).items()},
            peak=peak.balance if peak is not None else None,
            peak_at=timestamp(peak.at_ns) if peak is not None else None,
        )

    def _total(self, ledger: EngineLedger) -> Counter[str]:
        """Since we have listened, restarts included. A count of 0 is one too."""
        total = Counter(self._earlier)
        total.update(_counts(ledger))
        return total


class WindowStatsCache:
    """Measures windows of the past, one at a time, so that the thread that feeds the ledgers has a processor left. The
    last few are kept: what is over does not change.
    """

    def __init__(self, past: Past) -> None:
        self._past = past
        self._measuring = threading.Lock()
        self._known: LatestEntries[tuple[str, int, int, int], WindowStats] = LatestEntries(MAX_CACHED_WINDOWS)

    def of(self, live: EngineLedger, since_ns: int, until_ns: int, findings: Sequence[FindingReport]) -> WindowStats:
        """Return the statistics of an engine from one time to another (wall), with the `findings` of that time. Raises
        BadTime where nothing of it is kept, and for more than MOST_S.
        """
        last_received_ns = (
            live.last_received_ns if until_ns >= live.now_ns else 0
        )  # of what goes on, only until an event arrives
        key = (live.engine, since_ns, until_ns, last_received_ns)
        if until_ns - since_ns > MAX_WINDOW_S * 1e9:
            asked = duration((until_ns - since_ns) / 1e9)
            raise BadTime(f"a window of {asked} is too long to be measured: ask for {duration(MAX_WINDOW_S)} at most")
        with self._measuring:
            known = self._known.get(key) or self._measured(live, since_ns, until_ns)
            self._known[key] = known
        return msgspec.structs.replace(known, findings=list(findings))

    def _measured(self, live: EngineLedger, since_ns: int, until_ns: int) -> WindowStats:
        ledger, frames, from_ns = self._past.received(live, since_ns, until_ns)
        ledger.take_just_finished()  # those of before
        measuring = WindowMeter(from_ns)
        for frame in frames:
            measuring.look(frame, ledger)
            ledger.apply(frame)
            measuring.end(ledger.take_just_finished())
        if not measuring.has_begun:
            span = self._past.span(live)
            asked = f"from {timestamp(since_ns)} to {timestamp(until_ns)}"
            raise BadTime(
                f"nothing is kept of {live.engine} {asked}: what is begins at {span.first} and ends at {span.last}"
            )
        points = [point for point in ledger.points if since_ns <= point.at_ns <= until_ns]
        return measuring.stats("", ledger, points, [])


def _counts(ledger: EngineLedger) -> dict[str, int]:
    """Return the counts of this epoch of the engine."""
    totals, residency, recompute = ledger.state.totals, ledger.tally.residency, ledger.tally.recompute
    served = sum(count for status, count in totals.finished.items() if status in SERVED)
    return {
        "computed_tokens": totals.computed_tokens,
        "output_tokens": totals.output_tokens,
        "served": served,
        "not_served": sum(totals.finished.values()) - served,
        "preemptions": sum(totals.preemptions.values()),
        "tokens_lost": totals.tokens_lost,
        "recomputed_tokens": recompute.after_preemption + recompute.though_cached,
        "looked_up_tokens": totals.looked_up_tokens,
        "hit_tokens": totals.hit_tokens,
        "lifetimes": residency.lifetime.count,
        "lifetimes_ms": round(residency.lifetime.seconds * 1e3),
        "idle_residencies": residency.idle_before_evict.count,
        "idle_residencies_ms": round(residency.idle_before_evict.seconds * 1e3),
    }


def _waits_by_cause(ledger: EngineLedger, requests: list[RequestState]) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = {}
    for record in requests:
        for cause, seconds in waited_s(ledger, record).items():
            waits.setdefault(cause, []).append(seconds)
    return waits


# -------------------------------------------------------------------- two windows


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
        then, now = ([each for each in window.findings if each.code == code] for window in (before, after))
        example = (now or then)[0]
        rows.append(
            FindingRow(
                code=code,
                title=example.title,
                severity=example.severity,
                status="unchanged" if then and now else "added" if now else "removed",
                before=len(then),
                after=len(now),
                verdict=example.verdict,
                requests=[name for finding in now or then for name in finding.culprits.requests],
            )
        )
    order = ("added", "unchanged", "removed")
    return sorted(rows, key=lambda row: (order.index(row.status), -SEVERITIES.index(row.severity)))


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
    # From metrics, or of the requests that the stream has.
    first_tokens = (window.first_token or exact_latency(window.time_to_first_token_s) for window in (before, after))
    yield from _latency_rows("first token", *first_tokens)
    yield from _latency_rows("queue time", before.queue_time, after.queue_time)
    for cause in sorted(before.waited_s.keys() | after.waited_s.keys()):
        for word, quantile in (("median", 0.5), ("p95", 0.95)):
            waits = (window.waited_s.get(cause, []) for window in (before, after))
            row = _metric_row_of(f"waited, {cause}, {word}", "s", "down", (_quantile(each, quantile) for each in waits))
            # If no request waited for it, that counts as no time.
            yield msgspec.structs.replace(row, change=_change(row.before or 0.0, row.after or 0.0, "down"))
    for name, held, good in (
        ("in use at peak", ("running", "waiting", "finished", "unaccounted"), ""),
        ("held by finished at peak", ("finished",), "down"),
        ("UNACCOUNTED at peak", ("unaccounted",), "down"),
    ):
        yield _metric_row_of(name, "share", good, (_held_share(window, held) for window in (before, after)))


def _latency_rows(name: str, before: LatencyView | None, after: LatencyView | None) -> Iterator[MetricRow]:
    both = (before, after)
    yield _metric_row_of(f"{name}, median", "s", "down", (None if known is None else known.p50_s for known in both))
    yield _metric_row_of(f"{name}, p95", "s", "down", (None if known is None else known.p95_s for known in both))


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
    held = sum(getattr(peak, holder) for holder in holders) if peak is not None else 0
    return peak.share(held) if peak is not None else None
