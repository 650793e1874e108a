"""The harm that a finding does, the severity that follows from it, and the other explanations of what was seen.

The severity of a code in the catalogue is the one of an incident that matters. The effect of an *error* is measured:
one with little effect yet is a *warning*. Blocks that have not returned for a minute are a *warning* from a quarter of
the pool on and an *error* from half of it, or once a request waits for them: so much is out of use, for any reason.
Corruption and an engine that serves no request have no small amounts: these stay as the catalogue has them. Figures
that cannot tell what happens are no *error* while no request waits.

A rule's own conditions exclude most alternatives of what its code sees in the event stream. The others (`Unless`)
remain while a verdict is *likely*: the signal that would exclude them is absent. A *confirmed* finding has none that
remains.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final, NamedTuple, TypeVar

import msgspec

from ..base.text import duration
from ..contract.kinds import Cause
from ..ledger.engine_ledger import EngineLedger
from ..ledger.harms import contradicted_since_ns
from ..ledger.pool_forecast import MOST_POINTS, PoolForecast, forecast_from_usage, forecast_full
from ..ledger.records import RequestState
from .judgement import SEVERITIES, Alternative, FindingHarm, HoldsBlocks, Judgement, Severity, Unless

UNSEEN_CAUSE: Final = "a cause that this source does not expose"
"""An alternative of a finding from metrics, a log or a report, whose `missing` names the source that would show it."""
NO_EVENT_IS_MISSING: Final = "no event of the stream is missing"
NAMED_SINCE: Final = "events received since the loss name its blocks and requests"


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
HELD_BARS: Final = (
    HarmBar("warning", "share_of_pool", 0.25, "of the pool", "the pool serves a load that is a quarter smaller"),
    HarmBar("error", "share_of_pool", 0.5, "of the pool", "half of the load has no room left"),
)
"""Blocks that have not returned for HELD_S are at least this, and an *error* from the first bar on if a request waits
for them.
"""
HELD_S: Final = 60.0
"""Transfers take milliseconds to seconds: what has been kept for a minute is out of use."""
_SHORT_OF_BLOCKS: Final = frozenset((int(Cause.KV_BLOCKS), int(Cause.BEHIND_HEAD)))
_BEHIND_IT: Final = _SHORT_OF_BLOCKS | {int(Cause.NEW), int(Cause.PREEMPTED)}
GradedT = TypeVar("GradedT", bound=Judgement)


def verdict_of(
    ledger: EngineLedger, judged: GradedT, severity: Severity, table: Iterable[Alternative | Unless]
) -> GradedT:
    """Return what was seen with its harm, severity and alternatives. `severity` and `table` are those of its code."""
    harm = _harm_of(ledger, judged) if severity in ("error", "warning") else None
    graded = judged.severity
    if harm is not None and ledger.has_stream:
        graded = severity_by_harm(judged, graded or severity, harm, (ledger.now_ns - judged.since_ns) / 1e9)
    elif (graded or severity) == "error" and judged.verdict == "cannot-tell" and not _waiting_in_figures(ledger):
        graded = "warning"
    return msgspec.structs.replace(
        judged,
        harm=harm,
        severity=graded,
        alternatives=judged.alternatives or _alternatives(ledger, judged, table),
        explanation=judged.explanation + _forecast_text(harm.forecast if harm is not None else None),
    )


def _alternatives(
    ledger: EngineLedger, judged: Judgement, table: Iterable[Alternative | Unless]
) -> tuple[Alternative, ...]:
    """Return the other explanations of a judgement. excluded_by is empty for those that remain."""
    confirmed = judged.verdict == "confirmed"
    found = [
        Alternative(one.name, one.excluded_by if confirmed or isinstance(one, Alternative) else "")
        for one in (table if ledger.has_stream else ())
    ]
    if found:
        damaged = ledger.state.damaged
        lost = NAMED_SINCE if damaged and confirmed else "" if damaged else NO_EVENT_IS_MISSING
        found.append(Alternative("events that were lost", lost))
    if not confirmed and all(one.excluded_by for one in found):
        found.append(Alternative(UNSEEN_CAUSE, ""))
    return tuple(found)


def _harm_of(ledger: EngineLedger, judged: Judgement) -> FindingHarm | None:
    """Measure what it does to requests and to the pool. From metrics, only when the pool will be full is known."""
    # A hold that may be none has no forecast.
    forecasts = isinstance(judged, HoldsBlocks) and not judged.pending
    if not ledger.has_stream:
        forecast = _forecast_by_usage(ledger) if forecasts and judged.verdict != "cannot-tell" else None
        return FindingHarm(None, ledger.samples[-1].waiting, None, None, forecast) if forecast is not None else None
    living, state = ledger.living(), ledger.state
    harmed = {record.number: record for record in _harmed(ledger, judged)}
    wall_minus_mono = ledger.wall(1) - 1
    now_ns, began_ns = ledger.now_ns - wall_minus_mono, judged.since_ns - wall_minus_mono
    lost = sum([now_ns - max(r.since_ns, r.progressed_ns, began_ns) for r in harmed.values()]) / 1e9
    share = judged.share_of_pool if isinstance(judged, HoldsBlocks) else None
    usable = max(state.total - state.reserved, 1)
    return FindingHarm(
        share_of_pool=round(len(judged.blocks) / usable if share is None else share, 4),
        requests_waiting=len(harmed),
        share_of_requests=round(len(harmed) / max(len(living.waiting) + len(living.running), 1), 4),
        lost_s=round(max(lost, 0.0), 1),
        forecast=_forecast_by_blocks(ledger) if forecasts else None,
    )


def _harmed(ledger: EngineLedger, judged: Judgement) -> Iterator[RequestState]:
    """Yield its requests that still live, and for lost blocks or a blocked head of the queue, the requests that wait
    for blocks.
    """
    living, head, named = ledger.living(), ledger.head(), set(judged.requests)
    yield from (record for record in (*living.waiting, *living.running) if record.id in named)
    if isinstance(judged, HoldsBlocks) or (head is not None and head.id in named):
        yield from waiting_for_blocks(ledger)


def waiting_for_blocks(ledger: EngineLedger) -> list[RequestState]:
    """Return the head of the queue and those behind it, if it is short of blocks, as the pool bears out."""
    head = ledger.head()
    if head is None or head.cause not in _SHORT_OF_BLOCKS or contradicted_since_ns(ledger, head) is not None:
        return []
    return [record for record in ledger.living().waiting if record.cause in _BEHIND_IT]


def _forecast_by_usage(ledger: EngineLedger) -> PoolForecast | None:
    blocks = ledger.facts.get("num_gpu_blocks")
    if blocks is None or isinstance(blocks.value, str):
        return None
    known = [(one.at_ns / 1e9, one.usage) for one in ledger.samples if one.at_ns and one.usage is not None]
    usable = round(blocks.value) - 1  # block 0 is vLLM's own
    return forecast_from_usage([at_s for at_s, _ in known], [usage for _, usage in known], usable)


def _forecast_by_blocks(ledger: EngineLedger) -> PoolForecast | None:
    """Forecast when all blocks without a living request fill what living ones usually leave of the pool."""
    points = list(ledger.points)
    points = points[:: -(-len(points) // MOST_POINTS) or 1]
    if len(points) < 2:
        return None
    state, balances = ledger.state, [point.balance for point in points]
    live = median([one.running + one.waiting for one in balances])
    return forecast_full(
        [point.at_ns / 1e9 for point in points],
        [one.finished + one.unaccounted for one in balances],
        round(state.total - state.reserved - live),
    )


def _forecast_text(forecast: PoolForecast | None) -> str:
    if forecast is None:
        return ""
    band = f"{duration(forecast.earliest_s)} to {duration(forecast.latest_s)}"
    return f" At this rate the pool is full in {duration(forecast.full_in_s)} (9 in 10: {band})."


def _waiting_in_figures(ledger: EngineLedger) -> bool:
    """Whether a request waits by the last figures, or may, since they do not have that number."""
    return bool(ledger.samples) and ledger.samples[-1].waiting != 0


def severity_by_harm(judged: Judgement, severity: Severity, harm: FindingHarm, lasts_s: float) -> Severity:
    """Return the severity of a finding that has lasted for so long, where this one would be that of its code."""
    if severity == "error" and not any((getattr(harm, bar.measure) or 0) >= bar.least for bar in HARM_BARS):
        severity = "warning"
    if not isinstance(judged, HoldsBlocks) or lasts_s < HELD_S:
        return severity
    reached = [bar.severity for bar in HELD_BARS if (harm.share_of_pool or 0) >= bar.least]
    if reached and harm.requests_waiting:
        reached.append("error")
    return max((severity, *reached), key=SEVERITIES.index)
