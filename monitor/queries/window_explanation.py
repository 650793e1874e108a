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
    told: UsageFall, since_ns: int, until_ns: int, points: Sequence[Point], findings: list[FindingReport]
) -> ExplanationView:
    """Return a window (wall ns) in sentences, with harm to clients first: restarts, the queue and the bounds of the
    steps, findings, and the fall of usage in `told`. `points` and `findings` are of the window.
    """
    fell = told.highest is None or (told.lowest is not None and told.lowest.used < told.highest.used)
    fall = " ".join((_fall_in_words(told) if fell else "", _preemptions_in_words(points), _work_in_words(told)))
    found = findings_in_words(findings)
    return ExplanationView(
        engine=told.engine,
        since=timestamp(since_ns),
        until=timestamp(until_ns),
        sentences=list(filter(None, (_restarts_in_words(points), _queue_in_words(points), found, fall.strip()))),
        findings=findings,
    )


def drop_in_words(told: UsageDrop) -> str:
    """How usage fell in a window and why, and what the steps did, in a sentence or two."""
    said = _fall_in_words(told)
    if told.freed_in_drop:
        preempted = counted(told.preemptions, "preemption") if told.preemptions else "no preemption"
        said += f" In the whole window: {preempted}."
    return f"{said} {_work_in_words(told)}".strip()


def _fall_in_words(told: UsageFall) -> str:
    if told.highest is None or told.lowest is None or not told.usable:
        return "Nothing is known of what was used then."
    if told.lowest.used >= told.highest.used:
        last = told.lowest.used if told.used_after is None else told.used_after
        return f"Usage did not fall: {percent(last / told.usable)} of the pool at the end."
    top, bottom = (f"{percent(level.used / told.usable)} of the pool" for level in (told.highest, told.lowest))
    top_at, bottom_at = (_clock(level.at) for level in (told.highest, told.lowest))
    freed = sum(told.freed_in_drop.values())
    by = ", ".join(f"{blocks:,} {in_words(reason)}" for reason, blocks in told.freed_in_drop.items() if blocks)
    fell = f"Usage fell from {top} at {top_at} to {bottom} at {bottom_at}"
    return f"{fell}: {counted(freed, 'block')} became free ({by})." if freed else f"{fell}."


def _work_in_words(told: UsageFall) -> str:
    work, before = told.work, told.work_before
    if work.output_tokens >= before.output_tokens / 2:
        return ""
    said = f"{counted(work.output_tokens, 'token')} were generated, {before.output_tokens:,} in as long before:"
    if work.longest_without_step_s > work.seconds / 2:
        return f"{said} no step ended for {duration(work.longest_without_step_s)}."
    if not told.running_after:
        return f"{said} nothing runs any more."
    if work.computed_tokens > 2 * work.output_tokens:
        return f"{said} the steps computed {counted(work.computed_tokens, 'token')}, most of them of prompts."
    return f"{said} fewer run."


def _preemptions_in_words(points: Sequence[Point]) -> str:
    preemptions = points[-1].preemptions - points[0].preemptions if points else 0
    return f"{counted(preemptions, 'preemption')} in the window." if preemptions > 0 else ""


def _restarts_in_words(points: Sequence[Point]) -> str:
    restarts = [
        f"The engine was restarted: nothing was heard of it for {duration((after.at_ns - before.at_ns) / 1e9)} until"
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
        said = "No request waited."
    else:
        said = (
            f"{counted(longest.waiting, 'request')} waited at {clock_time(longest.at_ns)} ({_causes(longest)}):"
            f" {first.waiting:,} at the beginning, {last.waiting:,} at the end."
        )
    before = dict(first.limits)
    bound = {limit: steps - before.get(limit, 0) for limit, steps in last.limits}
    steps = sum(bound.values())
    limit = max(bound, key=bound.__getitem__, default=Limit.NONE)
    if limit != Limit.NONE and bound[limit] > 0:
        name = in_words(name_of(Limit, limit))
        said += f" {percent(bound[limit] / steps)} of {counted(steps, 'step')} were limited by {name}."
    return said


def _causes(point: Point) -> str:
    """How many waited for what, those behind the head of the queue last."""
    by_count = sorted(point.waiting_by, key=lambda pair: (pair[0] == Cause.BEHIND_HEAD, -pair[1]))
    return ", ".join(f"{count:,} {in_words(name_of(Cause, cause))}" for cause, count in by_count) or "reasons unknown"


def findings_in_words(findings: Sequence[FindingReport]) -> str:
    """Return the first findings with their explanations, and how many more there are."""
    told = []
    for finding in sorted(findings, key=lambda one: one.resolved_at is not None)[:MOST_FINDINGS]:
        over = f" (over since {finding.resolved_at[11:19]})" if finding.resolved_at else ""
        told.append(f"{finding.code}{over}: {finding.explanation}")
    if len(findings) > MOST_FINDINGS:
        told.append(f"{counted(len(findings) - MOST_FINDINGS, 'more finding')} touched this window.")
    return " ".join(told)


def _clock(stamp: str | None) -> str:
    """Return the clock part of an RFC 3339 stamp, with milliseconds."""
    return stamp[11:23] if stamp else "?"
