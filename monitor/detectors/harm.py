"""The harm that a finding does, and the severity that follows from it.

The severity of a code in the catalogue is the one of an incident that matters. The effect of an *error* is measured:
one with little effect yet is a *warning*. Blocks that are held and do not return are an *error* once they are half the
pool. Corruption and an engine that serves no request have no small amounts: these stay as the catalogue has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Final, NamedTuple

import msgspec

from kvscope.monitor.detectors.alternative_table import with_alternatives
from kvscope.monitor.detectors.judgement import FindingHarm, HoldsBlocks, Judgement, Severity
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.pool_forecast import MOST_POINTS, PoolForecast, forecast_from_usage, forecast_full
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import duration


class HarmBar(NamedTuple):
    """From which amount on a harm makes a finding at least of this severity, and the reason."""

    severity: Severity
    measure: str
    least: float
    unit: str
    reason: str


HARM_BARS: Final = (
    HarmBar("error", "share_of_pool", 0.01, "of the pool", "with less gone no load is refused that fitted before"),
    HarmBar("error", "share_of_requests", 0.01, "of the requests", "of a hundred clients more than one notices it"),
    HarmBar("error", "lost_s", 600, "request-seconds", "ten minutes of waiting are a timeout for most clients"),
)
"""An *error* that reaches none of these is a *warning*."""
HELD_BAR: Final = HarmBar("error", "share_of_pool", 0.5, "of the pool", "half of the load has no room left")
"""A *warning* about blocks that do not return and that reaches this is an *error*."""
_SHORT_OF_BLOCKS: Final = frozenset((int(Cause.KV_BLOCKS), int(Cause.BEHIND_HEAD)))


def graded(
    ledger: EngineLedger, judgements: Iterable[Judgement], severities: Mapping[str, Severity]
) -> list[Judgement]:
    """Return the judgements with their harm, severity and alternatives. severities: of the catalogue, by code."""
    waiting = _Waiting(ledger)
    return [with_alternatives(ledger, _graded(waiting, judged, severities.get(judged.code))) for judged in judgements]


def _graded(waiting: _Waiting, judged: Judgement, severity: Severity | None) -> Judgement:
    if severity not in ("error", "warning"):
        return judged
    if not waiting.ledger.has_stream:
        return _with_forecast(waiting.ledger, judged)
    harm = waiting.harm_of(judged)
    text = judged.explanation + _forecast_text(harm.forecast)
    graded_severity = judged.severity if judged.severity == "info" else severity_by_harm(judged, severity, harm)
    return msgspec.structs.replace(judged, harm=harm, severity=graded_severity, explanation=text)


def _with_forecast(ledger: EngineLedger, judged: Judgement) -> Judgement:
    """Add when the pool is full, by usage over time. A verdict that may be wrong about the hold has no forecast."""
    if not isinstance(judged, HoldsBlocks) or judged.pending or judged.verdict == "cannot-tell":
        return judged
    blocks = ledger.facts.get("num_gpu_blocks")
    if blocks is None or isinstance(blocks.value, str):
        return judged
    known = [(one.at_ns / 1e9, one.usage) for one in ledger.samples if one.at_ns and one.usage is not None]
    usable = round(blocks.value) - 1  # block 0 is vLLM's own
    forecast = forecast_from_usage([at_s for at_s, _ in known], [usage for _, usage in known], usable)
    if forecast is None:
        return judged
    harm = FindingHarm(None, ledger.samples[-1].waiting, None, None, forecast)
    return msgspec.structs.replace(judged, harm=harm, explanation=judged.explanation + _forecast_text(forecast))


def _forecast_text(forecast: PoolForecast | None) -> str:
    if forecast is None:
        return ""
    band = f"{duration(forecast.earliest_s)} to {duration(forecast.latest_s)}"
    return f" At this rate the pool is full in {duration(forecast.full_in_s)} (9 in 10: {band})."


def severity_by_harm(judged: Judgement, severity: Severity, harm: FindingHarm) -> Severity:
    """Return the severity of a finding whose code has this one in the catalogue."""
    if severity == "error" and not any((getattr(harm, bar.measure) or 0) >= bar.least for bar in HARM_BARS):
        return "warning"
    if severity == "warning" and isinstance(judged, HoldsBlocks) and (harm.share_of_pool or 0) >= HELD_BAR.least:
        return "error"
    return severity


class _Waiting:
    """The requests of an engine by id and by what they wait for, sorted once for all of its judgements."""

    def __init__(self, ledger: EngineLedger) -> None:
        self.ledger = ledger
        self._by_id: dict[str, RequestState] | None = None
        self._for_blocks: list[RequestState] = []
        self._has_forecast = False
        self._pool_forecast: PoolForecast | None = None

    def harm_of(self, judged: Judgement) -> FindingHarm:
        """Measure what it does to requests and to the pool."""
        ledger, state = self.ledger, self.ledger.state
        usable = max(state.total - state.reserved, 1)
        share = judged.share_of_pool if isinstance(judged, HoldsBlocks) else None
        harmed = {record.number: record for record in self._harmed(judged)}
        wall_minus_mono = ledger.wall(1) - 1
        now_ns, began_ns = ledger.now_ns - wall_minus_mono, judged.since_ns - wall_minus_mono
        lost = sum([now_ns - max(r.since_ns, r.progressed_ns, began_ns) for r in harmed.values()]) / 1e9
        return FindingHarm(
            share_of_pool=round(len(judged.blocks) / usable if share is None else share, 4),
            requests_waiting=len(harmed),
            share_of_requests=round(len(harmed) / max(len(self._sorted()), 1), 4),
            lost_s=round(max(lost, 0.0), 1),
            forecast=self._forecast() if isinstance(judged, HoldsBlocks) and not judged.pending else None,
        )

    def _forecast(self) -> PoolForecast | None:
        """Forecast when all blocks without a living request fill what living ones usually leave of the pool."""
        if not self._has_forecast:
            self._has_forecast = True
            points = list(self.ledger.points)
            points = points[:: -(-len(points) // MOST_POINTS) or 1]
            if len(points) > 1:
                state, balances = self.ledger.state, [point.balance for point in points]
                live = median([one.running + one.waiting for one in balances])
                self._pool_forecast = forecast_full(
                    [point.at_ns / 1e9 for point in points],
                    [one.finished + one.unaccounted for one in balances],
                    round(state.total - state.reserved - live),
                )
        return self._pool_forecast

    def _harmed(self, judged: Judgement) -> Iterator[RequestState]:
        """Yield its requests that still live, and for lost blocks or a blocked head of the queue, the requests that
        wait for blocks.
        """
        by_id = self._sorted()
        yield from (by_id[name] for name in judged.requests if name in by_id)
        head = self.ledger.head()
        if isinstance(judged, HoldsBlocks) or (head is not None and head.id in judged.requests):
            yield from self._for_blocks

    def _sorted(self) -> dict[str, RequestState]:
        if self._by_id is None:
            living = self.ledger.living()
            self._by_id = {record.id: record for record in (*living.waiting, *living.running)}
            head = self.ledger.head()
            if head is not None and head.cause in _SHORT_OF_BLOCKS:
                behind = (Cause.NEW, Cause.PREEMPTED, *_SHORT_OF_BLOCKS)
                self._for_blocks = [record for record in living.waiting if record.cause in behind]
        return self._by_id
