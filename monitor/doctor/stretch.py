"""What a stretch of an engine's recorded life was like, in the figures by which two of them are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from monitor.detectors.thresholds import Settings
from monitor.doctor.window import Span, at_of
from monitor.events.records import RequestState
from monitor.events.wire import Batch, Keyframe
from monitor.findings import FindingReport
from monitor.ledger.balance import Balance
from monitor.ledger.latency import SERVED
from monitor.ledger.ledger import EngineLedger, Point, Record
from monitor.ledger.waits import waited_s
from monitor.ledger.words import timestamp
from monitor.watch import Watch


class Stretch(msgspec.Struct, kw_only=True):
    """One stretch of one engine. Times are RFC 3339, durations in seconds.

    waits: by what was waited for, how long each request did that ended in the stretch or was there at its end.
    first_tokens: from arrival to the first token, of those whose first token was in it. counts: of what happened in it.
    peak: the pool when most of it was in use; None if nothing is known of it.
    """

    source: str
    since: str | None
    until: str | None
    seconds: float
    engine: str
    findings: list[FindingReport] = []
    waits: dict[str, list[float]] = {}
    first_tokens: list[float] = []
    counts: dict[str, int] = {}
    peak: Balance | None = None
    peak_at: str | None = None


class _Counting:
    """What an engine has counted since we have listened, its restarts included."""

    def __init__(self) -> None:
        self._before: Counter[str] = Counter()

    def restart(self, ledger: EngineLedger) -> None:
        self._before.update(self._of(ledger))

    def total(self, ledger: EngineLedger | None) -> Counter[str]:
        """A count of 0 is one too."""
        total = Counter(self._before)
        if ledger is not None:
            total.update(self._of(ledger))
        return total

    def _of(self, ledger: EngineLedger) -> Counter[str]:
        totals, residency, recompute = ledger.state.totals, ledger.tally.residency, ledger.tally.recompute
        served = sum(count for status, count in totals.finished.items() if status in SERVED)
        return Counter(
            {
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
                "idle_stays": residency.idle_before_evict.count,
                "idle_stays_ms": round(residency.idle_before_evict.seconds * 1e3),
            }
        )


def measure(source: str, records: Iterable[Record], span: Span, settings: Settings) -> list[Stretch]:
    """That span of a recording, one stretch for each of its engines; what came before is folded in, and not counted."""
    watch = Watch(settings)
    counting: dict[str, _Counting] = {}
    before: dict[str, Counter[str]] = {}
    ended: dict[str, list[RequestState]] = {}
    engines = watch.fleet.engines
    for record in records:
        at_ns = at_of(record)
        if at_ns > span.until_ns:
            break
        counts = counting.setdefault(record.engine, _Counting())
        ledger = engines.get(record.engine)
        if record.engine not in before and at_ns >= span.since_ns:
            before[record.engine] = counts.total(ledger)
        if ledger is not None and isinstance(record, Batch | Keyframe) and record.epoch > ledger.epoch:
            counts.restart(ledger)
        watch.feed([record])
        for one in watch.take_ended():
            if record.engine in before:
                ended.setdefault(record.engine, []).append(one.request)
    watch.settle()
    found = watch.find(since=timestamp(span.since_ns) or "")
    return [
        _stretch(
            source, ledger, span, ended.get(name, []), _since(before[name], counting[name].total(ledger)),
            [finding for finding in found if finding.engine == name],
        )
        for name, ledger in engines.items()
        if name in before
    ]  # fmt: skip


def _since(before: Counter[str], now: Counter[str]) -> dict[str, int]:
    return {name: count - before[name] for name, count in now.items()}


def _stretch(
    source: str,
    ledger: EngineLedger,
    span: Span,
    ended: list[RequestState],
    counts: dict[str, int],
    findings: list[FindingReport],
) -> Stretch:
    points = [point for point in ledger.points if span.since_ns <= point.at_ns <= span.until_ns]
    began_ns = max(span.since_ns, ledger.joined_ns)
    requests = [*ended, *(record for record in ledger.state.requests.values() if not record.is_finished)]
    peak = max(points, key=_used, default=None)
    return Stretch(
        source=source,
        since=timestamp(began_ns),
        until=timestamp(ledger.now_ns),
        seconds=max(ledger.now_ns - began_ns, 0) / 1e9,
        engine=ledger.engine,
        findings=findings,
        waits=_waits(ledger, requests),
        first_tokens=[
            (record.first_token_ns - record.arrived_ns) / 1e9
            for record in requests
            if record.arrived_ns and record.first_token_ns and ledger.wall(record.first_token_ns) >= span.since_ns
        ],
        counts=counts,
        peak=peak.balance if peak is not None else None,
        peak_at=timestamp(peak.at_ns) if peak is not None else None,
    )


def _waits(ledger: EngineLedger, requests: list[RequestState]) -> dict[str, list[float]]:
    waits: dict[str, list[float]] = {}
    for record in requests:
        for cause, seconds in waited_s(ledger, record).items():
            waits.setdefault(cause, []).append(seconds)
    return waits


def _used(point: Point) -> int:
    balance = point.balance
    return balance.total - balance.free - balance.cached_idle - balance.reserved
