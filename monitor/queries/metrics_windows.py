"""Windows of an engine that is known from its metrics alone: points, statistics and a summary, from its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from kvscope.monitor.analysis.request_latency import sample_latency
from kvscope.monitor.errors import NotKnown
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.planning.kv_pool import RESERVED_NULL_BLOCKS
from kvscope.monitor.queries.points import evenly_thinned
from kvscope.monitor.queries.running_plan import running_pool
from kvscope.monitor.queries.window_explanation import findings_in_words
from kvscope.monitor.reason_words import in_words
from kvscope.monitor.schema import ExplanationView, PointView, WindowStats
from kvscope.monitor.text import clock_time, counted, duration, percent, timestamp

POINT_LATENCY_NS: Final = 60_000_000_000
"""The latencies of a point are of this long before it, or since the point before if that is longer: few requests come
between two scrapes.
"""
WINDOW_COUNTERS: Final[dict[str, Callable[[Sample], int | None]]] = {
    "output_tokens": lambda sample: sample.generation_tokens,
    "served": lambda sample: sample.finished,
    "not_served": lambda sample: sample.aborted,
    "preemptions": lambda sample: sample.preemptions,
    "looked_up_tokens": lambda sample: sample.prefix_queries,
    "hit_tokens": lambda sample: sample.prefix_hits,
}
"""The counters of a window, by the names of WindowStats.counts. All are sums since the engine's start."""


def waiting_by_reason(sample: Sample) -> dict[str, int]:
    """Return how many wait for each reason that vLLM's page has: for capacity, or deferred. Empty if it has none."""
    if sample.deferred is None or sample.waiting is None:
        return {}
    reasons = {"CAPACITY": max(sample.waiting - sample.deferred, 0), "DEFERRED": sample.deferred}
    return {reason: count for reason, count in reasons.items() if count}


def usable_blocks(ledger: EngineLedger) -> int | None:
    """Return the blocks that requests can have, by the configuration on the page, or None where it states none."""
    try:
        return running_pool(ledger).blocks - RESERVED_NULL_BLOCKS
    except NotKnown:
        return None


def sample_points(ledger: EngineLedger, samples: Sequence[Sample], most: int) -> list[PointView]:
    """Return at most `most` points of a window's samples, evenly thinned, the last among them."""
    usable = usable_blocks(ledger)
    points, since_ns = [], 0
    moments = [sample.at_ns or 0 for sample in samples]
    for sample in evenly_thinned(samples, most):
        at_ns = sample.at_ns or 0
        first, end = bisect_right(moments, since_ns), bisect_right(moments, at_ns)
        restarted = any(one.restarted for one in samples[max(first, 1) : end])
        minute = bisect_right(moments, at_ns - POINT_LATENCY_NS)
        points.append(_sample_point(sample, at_ns, usable, restarted, samples[min(first, minute) : end]))
        since_ns = at_ns
    return points


def _sample_point(
    sample: Sample, at_ns: int, usable: int | None, restarted: bool, recent: Sequence[Sample]
) -> PointView:
    """Return one point, with latencies of the requests that the recent samples count."""
    first_token, queue_time = sample_latency(recent)
    return PointView(
        at=timestamp(at_ns) or "",
        at_ns=at_ns,
        requests_running=sample.running,
        requests_waiting=sample.waiting,
        preemptions=sample.preemptions,
        output_tokens=sample.generation_tokens,
        waiting_by_reason=waiting_by_reason(sample),
        steps=sample.steps,
        usable=usable,
        usage=sample.usage,
        restarted=restarted,
        output_tokens_per_s=sample.generation_tokens_per_s,
        computed_tokens_per_s=sample.prompt_tokens_per_s,
        prefix_hit_rate=sample.prefix_hit_rate,
        first_token=first_token,
        queue_time=queue_time,
    )


def sample_stats(engine: str, samples: Sequence[Sample], findings: Sequence[FindingReport]) -> WindowStats:
    """Return the statistics of a window by its samples, at least two. Values that the page does not expose are
    absent.
    """
    first, last = samples[0].at_ns or 0, samples[-1].at_ns or 0
    peak = max((sample for sample in samples if sample.usage is not None), key=lambda s: s.usage or 0.0, default=None)
    first_token, queue_time = sample_latency(samples[1:])
    counts = {name: _grown(samples, counter) for name, counter in WINDOW_COUNTERS.items()}
    return WindowStats(
        source="",
        since=timestamp(first),
        until=timestamp(last),
        seconds=(last - first) / 1e9,
        engine=engine,
        findings=list(findings),
        counts={name: count for name, count in counts.items() if count is not None},
        peak_at=timestamp(peak.at_ns or 0) if peak is not None else None,
        peak_usage=peak.usage if peak is not None else None,
        first_token=first_token,
        queue_time=queue_time,
    )


def _grown(samples: Sequence[Sample], counter: Callable[[Sample], int | None]) -> int | None:
    """Return by how much a counter grew in a window, restarts included, or None where the page does not have it."""
    grown, known = 0, False
    for before, after in pairwise(samples):
        then, now = counter(before), counter(after)
        if now is None:
            continue
        if after.restarted:
            grown, known = grown + now, True
        elif then is not None:
            grown, known = grown + max(now - then, 0), True
    return grown if known else None


def sample_explanation(
    engine: str, samples: Sequence[Sample], since_ns: int, until_ns: int, findings: list[FindingReport]
) -> ExplanationView:
    """Summarize a window (wall): usage, the queue, preemptions, restarts, and the findings whose life touches it."""
    sentences = [
        _usage_text(samples),
        _queue_text(samples),
        _latency_text(samples),
        _events_text(samples),
        findings_in_words(findings),
    ]
    return ExplanationView(
        engine=engine,
        since=timestamp(since_ns),
        until=timestamp(until_ns),
        sentences=list(filter(None, sentences)),
        findings=findings,
    )


def _usage_text(samples: Sequence[Sample]) -> str:
    used = [(sample.usage, sample.at_ns or 0) for sample in samples if sample.usage is not None]
    if not used:
        return "No sample of this window has the pool's usage."
    (highest, top_ns), (lowest, low_ns) = max(used, key=lambda one: one[0]), min(used, key=lambda one: one[0])
    if percent(highest) == percent(lowest):
        return f"Usage was {percent(highest)} of the pool throughout."
    return (
        f"Usage was {percent(highest)} of the pool at most, at {clock_time(top_ns)}, {percent(lowest)} at least, at"
        f" {clock_time(low_ns)}, and {percent(used[-1][0])} at the end."
    )


def _queue_text(samples: Sequence[Sample]) -> str:
    queues = [(sample.waiting, sample) for sample in samples if sample.waiting is not None]
    if not queues:
        return ""
    most, longest = max(queues, key=lambda one: one[0])
    if not most:
        return "No request waited at any scrape."
    reasons = waiting_by_reason(longest)
    why = f" ({', '.join(f'{count:,} {in_words(reason)}' for reason, count in reasons.items())})" if reasons else ""
    return (
        f"{counted(most, 'request')} waited{why} at {clock_time(longest.at_ns or 0)}; {queues[0][0]:,} at the"
        f" beginning, {queues[-1][0]:,} at the end."
    )


def _latency_text(samples: Sequence[Sample]) -> str:
    """How long requests of the window took: what the sample at its beginning counts was before."""
    first_token, queue_time = sample_latency(samples[1:])
    return " ".join(
        f"{name}: p50 {duration(known.p50_s)}, p95 {duration(known.p95_s)} ({counted(known.requests, 'request')})."
        for name, known in (("Time to first token", first_token), ("Queue time", queue_time))
        if known is not None
    )


def _events_text(samples: Sequence[Sample]) -> str:
    preemptions = _grown(samples, WINDOW_COUNTERS["preemptions"]) or 0
    restarts = sum(sample.restarted for sample in samples)
    parts = []
    if preemptions:
        parts.append(f"{counted(preemptions, 'preemption')} in the window.")
    if restarts:
        parts.append(f"The engine was restarted {counted(restarts, 'time')}.")
    return " ".join(parts)
