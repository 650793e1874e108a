"""Statistics of a window of an engine, for comparisons of two.

Measured is what is folded in: of a block that was handed out before that begins, no lifetime is known.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvscope.monitor.analysis.wait_tree import waited_s
from kvscope.monitor.errors import BadTime
from kvscope.monitor.events.wire import Frame, Keyframe
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.ledger.balance import Balance
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.ledger.latency import SERVED
from kvscope.monitor.queries.past import Past
from kvscope.monitor.schema import WindowStats
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import duration, timestamp

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
        peak = max(points, key=_used_blocks, default=None)
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
        self._known: OrderedDict[tuple[str, int, int, int], WindowStats] = OrderedDict()

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
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = self._measured(live, since_ns, until_ns)
            self._known.move_to_end(key)
            while len(self._known) > MAX_CACHED_WINDOWS:
                self._known.popitem(last=False)
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


def _used_blocks(point: Point) -> int:
    balance: Balance = point.balance
    return balance.total - balance.free - balance.cached_idle - balance.reserved
