"""A window of an engine: its points, its findings, and a summary in sentences, by its stream or its metrics alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, TypeVar

from ..base.errors import NotKnown
from ..base.text import clock_time, counted, duration, in_words, percent, timestamp
from ..contract.kinds import Cause, Limit, name_of
from ..contract.samples import Sample
from ..detectors.findings import Finding, FindingReport, Findings, FindingState
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.pool_account import share_of_pool
from ..ledger.request_latency import sample_latency
from ..ledger.usage_drop import UsageDrop, UsageFall
from ..planning.kv_pool import RESERVED_NULL_BLOCKS
from .memory_usage import running_pool
from .schema import ExplanationView, PointView, WindowStats

ThinnedItem = TypeVar("ThinnedItem")


def point_views(points: Sequence[Point], most: int) -> list[PointView]:
    """Return at most `most` points, evenly thinned, the last among them."""
    kept = evenly_thinned(points, most)
    started = [False, *(_epoch(point) > _epoch(before) > 0 for before, point in pairwise(kept))]
    return [_point_view(point, restarted) for point, restarted in zip(kept, started, strict=False)]


def evenly_thinned(items: Sequence[ThinnedItem], most: int) -> Sequence[ThinnedItem]:
    """Return every n-th item, the last among them, so that they are at most `most`."""
    stride = max(1, -(-len(items) // most))
    return items[(len(items) - 1) % stride :: stride] if items else items


def _epoch(point: Point) -> int:
    return point.position.epoch if point.position is not None else 0


def _point_view(point: Point, restarted: bool) -> PointView:
    balance = point.balance
    return PointView(
        at=timestamp(point.at_ns) or "",
        at_ns=point.at_ns,
        free=balance.free,
        cached_idle=balance.cached_idle,
        running=balance.running,
        waiting=balance.waiting,
        finished=balance.finished,
        reserved=balance.reserved,
        unaccounted=balance.unaccounted,
        requests_running=point.running,
        requests_waiting=point.waiting,
        preemptions=point.preemptions,
        output_tokens=point.output_tokens,
        computed_tokens=point.computed_tokens,
        waiting_by_reason={name_of(Cause, cause): count for cause, count in point.waiting_by},
        allocation_failures=point.allocation_failures,
        steps=point.steps,
        limits={name_of(Limit, limit): steps for limit, steps in point.limits},
        unused_tokens=point.unused_tokens if point.unused_tokens >= 0 else None,
        usable=balance.usable,
        usage=balance.usage,
        epoch=_epoch(point) or None,
        restarted=restarted,
    )


# -------------------------------------------------------------------- in sentences


MOST_FINDINGS: Final = 3


def explanation(
    usage_fall: UsageFall, since_ns: int, until_ns: int, points: Sequence[Point], findings: list[FindingReport]
) -> ExplanationView:
    """Return a window (wall ns) in sentences, with harm to clients first: restarts, the queue and the bounds of the
    steps, findings, and the fall of usage in `usage_fall`. `points` and `findings` are of the window.
    """
    fell = usage_fall.highest is None or (
        usage_fall.lowest is not None and usage_fall.lowest.used < usage_fall.highest.used
    )
    preemptions = points[-1].preemptions - points[0].preemptions if points else 0
    preempted = f"{counted(preemptions, 'preemption')} in the window." if preemptions > 0 else ""
    fall = " ".join((_fall_in_words(usage_fall) if fell else "", preempted, _work_in_words(usage_fall)))
    found = findings_in_words(findings)
    return ExplanationView(
        engine=usage_fall.engine,
        since=timestamp(since_ns),
        until=timestamp(until_ns),
        sentences=list(filter(None, (_restarts_in_words(points), _queue_in_words(points), found, fall.strip()))),
        findings=findings,
    )


def drop_in_words(usage_fall: UsageDrop) -> str:
    """How usage fell in a window and why, and what the steps did, in a sentence or two."""
    sentence = _fall_in_words(usage_fall)
    if usage_fall.freed_in_drop:
        preempted = counted(usage_fall.preemptions, "preemption") if usage_fall.preemptions else "no preemption"
        sentence += f" In the whole window: {preempted}."
    return f"{sentence} {_work_in_words(usage_fall)}".strip()


def _of_pool(blocks: int, usable: int) -> str:
    return f"{percent(share_of_pool(blocks, usable) or 0.0)} of the pool"


def _fall_in_words(usage_fall: UsageFall) -> str:
    if usage_fall.highest is None or usage_fall.lowest is None or not usage_fall.usable:
        return "Nothing is known of what was used then."
    if usage_fall.lowest.used >= usage_fall.highest.used:
        last = usage_fall.lowest.used if usage_fall.used_after is None else usage_fall.used_after
        return f"Usage did not fall: {_of_pool(last, usage_fall.usable)} at the end."
    top, bottom = (_of_pool(level.used, usage_fall.usable) for level in (usage_fall.highest, usage_fall.lowest))
    top_at, bottom_at = (_clock(level.at) for level in (usage_fall.highest, usage_fall.lowest))
    freed = sum(usage_fall.freed_in_drop.values())
    by = ", ".join(f"{blocks:,} {in_words(reason)}" for reason, blocks in usage_fall.freed_in_drop.items() if blocks)
    fell = f"Usage fell from {top} at {top_at} to {bottom} at {bottom_at}"
    return f"{fell}: {counted(freed, 'block')} became free ({by})." if freed else f"{fell}."


def _work_in_words(usage_fall: UsageFall) -> str:
    work, before = usage_fall.work, usage_fall.work_before
    if work.output_tokens >= before.output_tokens / 2:
        return ""
    sentence = f"{counted(work.output_tokens, 'token')} were generated, {before.output_tokens:,} in as long before:"
    if work.longest_without_step_s > work.seconds / 2:
        return f"{sentence} no step ended for {duration(work.longest_without_step_s)}."
    if not usage_fall.running_after:
        return f"{sentence} nothing runs any more."
    if work.computed_tokens > 2 * work.output_tokens:
        return f"{sentence} the steps computed {counted(work.computed_tokens, 'token')}, most of them of prompts."
    return f"{sentence} fewer run."


def _restarts_in_words(points: Sequence[Point]) -> str:
    restarts = [
        f"The engine was restarted: no event was received for {duration((after.at_ns - before.at_ns) / 1e9)} until"
        f" {clock_time(after.at_ns)}."
        for before, after in pairwise(points)
        if before.position and after.position and before.position.epoch != after.position.epoch
    ]
    return " ".join(restarts)


def _queue_in_words(points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    longest = max(points, key=lambda point: point.waiting)
    if not longest.waiting:
        sentence = "No request waited."
    else:
        sentence = (
            f"{counted(longest.waiting, 'request')} waited at {clock_time(longest.at_ns)} ({_causes(longest)}):"
            f" {first.waiting:,} at the beginning, {last.waiting:,} at the end."
        )
    before = dict(first.limits)
    bound = {limit: steps - before.get(limit, 0) for limit, steps in last.limits}
    steps = sum(bound.values())
    limit = max(bound, key=bound.__getitem__, default=Limit.NONE)
    if limit != Limit.NONE and bound[limit] > 0:
        name = in_words(name_of(Limit, limit))
        sentence += f" {percent(bound[limit] / steps)} of {counted(steps, 'step')} were limited by {name}."
    return sentence


def _causes(point: Point) -> str:
    """How many waited for what, those behind the head of the queue last."""
    by_count = sorted(point.waiting_by, key=lambda pair: (pair[0] == Cause.BEHIND_HEAD, -pair[1]))
    return ", ".join(f"{count:,} {in_words(name_of(Cause, cause))}" for cause, count in by_count) or "reasons unknown"


def findings_in_words(findings: Sequence[FindingReport]) -> str:
    """Return the first findings with their explanations, and how many more there are."""
    usage_fall = []
    for finding in sorted(findings, key=lambda one: one.resolved_at is not None)[:MOST_FINDINGS]:
        over = f" (over since {finding.resolved_at[11:19]})" if finding.resolved_at else ""
        usage_fall.append(f"{finding.code}{over}: {finding.explanation}")
    if len(findings) > MOST_FINDINGS:
        usage_fall.append(f"{counted(len(findings) - MOST_FINDINGS, 'more finding')} touched this window.")
    return " ".join(usage_fall)


def _clock(stamp: str | None) -> str:
    """Return the clock part of an RFC 3339 stamp, with milliseconds."""
    return stamp[11:23] if stamp else "?"


# -------------------------------------------------------------------- from metrics alone


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
        usage=sample.shown_usage,
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
    known = [sample for sample in samples if sample.shown_usage is not None]
    peak = max(known, key=lambda sample: sample.shown_usage or 0.0, default=None)
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
        peak_usage=peak.shown_usage if peak is not None else None,
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
    used = [(one.shown_usage, one.at_ns or 0) for one in samples if one.shown_usage is not None]
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


# -------------------------------------------------------------------- findings


FOREVER: Final = 1 << 62


def findings_between(
    findings: Findings, state: FindingState | None, engine: str, from_ns: int, to_ns: int
) -> list[FindingReport]:
    """Return findings in a state (firing and resolved without one), of one engine if named, active in a window (wall
    ns).
    """
    found: list[Finding] = []
    if state in (None, "firing"):
        found += findings.firing() + findings.set_aside_since(to_ns)
    if state in (None, "resolved"):
        found += findings.resolved()
    if state == "pending":
        found += findings.pending()
    if state == "suppressed":
        found += findings.suppressed()
    return [
        finding.report()
        for finding in found
        if engine in ("", finding.judgement.engine) and touches(finding, from_ns, to_ns)
    ]


def fired_between(findings: Findings, engine: str, from_ns: int, to_ns: int) -> list[FindingReport]:
    """Return findings of an engine that were active in a window (wall ns) and had fired by its end."""
    return [
        finding.report()
        for finding in (
            *findings.firing(),
            *findings.set_aside_since(to_ns),
            *findings.suppressed(),
            *findings.resolved(),
        )
        if finding.judgement.engine == engine
        and 0 < finding.intervals(FOREVER)[0].fired_ns <= to_ns
        and touches(finding, from_ns, to_ns)
    ]


def firing_at(findings: Findings, engine: str, at_ns: int) -> list[Finding]:
    """Return the findings of an engine that fired at a time (wall ns)."""
    return [
        finding
        for finding in (*findings.firing(), *findings.set_aside_since(at_ns), *findings.resolved())
        if finding.judgement.engine == engine
        and any(one.fired_ns <= at_ns < one.resolved_ns for one in finding.intervals(FOREVER + 1))
    ]


def touches(finding: Finding, from_ns: int, to_ns: int) -> bool:
    """Return whether a finding was active in a window (wall ns)."""
    return any(one.since_ns <= to_ns and one.resolved_ns >= from_ns for one in finding.intervals(FOREVER))
