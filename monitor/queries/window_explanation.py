"""Explains a window of time in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from kvscope.monitor.analysis.usage_drop import UsageDrop, UsageFall
from kvscope.monitor.events.kinds import Cause, Limit, name_of
from kvscope.monitor.findings import FindingReport
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.reason_words import in_words
from kvscope.monitor.schema import ExplanationView
from kvscope.monitor.text import clock_time, counted, duration, percent, timestamp

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
    fall = " ".join(
        (_fall_in_words(usage_fall) if fell else "", _preemptions_in_words(points), _work_in_words(usage_fall))
    )
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


def _fall_in_words(usage_fall: UsageFall) -> str:
    if usage_fall.highest is None or usage_fall.lowest is None or not usage_fall.usable:
        return "Nothing is known of what was used then."
    if usage_fall.lowest.used >= usage_fall.highest.used:
        last = usage_fall.lowest.used if usage_fall.used_after is None else usage_fall.used_after
        return f"Usage did not fall: {percent(last / usage_fall.usable)} of the pool at the end."
    top, bottom = (
        f"{percent(level.used / usage_fall.usable)} of the pool" for level in (usage_fall.highest, usage_fall.lowest)
    )
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


def _preemptions_in_words(points: Sequence[Point]) -> str:
    preemptions = points[-1].preemptions - points[0].preemptions if points else 0
    return f"{counted(preemptions, 'preemption')} in the window." if preemptions > 0 else ""


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
