"""What happened in a window of time, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from monitor.events.kinds import Cause, Limit, name_of
from monitor.findings import FindingReport
from monitor.ledger.drops import Drop
from monitor.ledger.ledger import EngineLedger, Point
from monitor.ledger.words import clock_time, counted, duration, percent
from monitor.views import ExplanationView

MOST_FINDINGS: Final = 3


def explanation(
    ledger: EngineLedger, told: Drop, points: Sequence[Point], findings: list[FindingReport]
) -> ExplanationView:
    """Of the window that `told` is about: what usage did, what the queue did and what bounded the steps, and what was
    found. `points` are the window's own, `findings` those whose life touches it.
    """
    sentences = [drop_in_words(told), _queue_in_words(points), _findings_in_words(findings)]
    return ExplanationView(ledger.engine, told.since, told.until, list(filter(None, sentences)), findings)


def drop_in_words(told: Drop) -> str:
    """How usage fell in a window and why, and what the steps did, in a sentence or two."""
    said = "Nothing is known of what was used then."
    if told.highest is not None and told.lowest is not None:
        top, bottom = (f"{percent(level.used / told.usable)} of the pool" for level in (told.highest, told.lowest))
        said = f"Usage did not fall: {bottom} at the end."
        if told.lowest.used < told.highest.used:
            top_at, bottom_at = (_clock(level.at) for level in (told.highest, told.lowest))
            freed = sum(told.freed_in_fall.values())
            by = " and ".join(f"{blocks:,} as {reason}" for reason, blocks in told.freed_in_fall.items() if blocks)
            said = (
                f"Usage fell from {top} at {top_at} to {bottom} at {bottom_at}: {counted(freed, 'block')} became free,"
                f" {by}. In the whole window:"
                f" {counted(told.preemptions, 'preemption') if told.preemptions else 'nobody was preempted'}."
            )
    work, before = told.work, told.work_before
    if work.output_tokens < before.output_tokens / 2 and before.output_tokens:
        said += f" {counted(work.output_tokens, 'token')} were generated, {before.output_tokens:,} in as long before:"
        if work.longest_without_step_s > work.seconds / 2:
            said += f" no step ended for {duration(work.longest_without_step_s)}."
        elif not told.running_after:
            said += " nothing runs any more."
        elif work.computed_tokens > 2 * work.output_tokens:
            said += f" the steps computed {counted(work.computed_tokens, 'token')}, most of them of prompts."
        else:
            said += " fewer run."
    return said


def _queue_in_words(points: Sequence[Point]) -> str:
    if len(points) < 2:
        return ""
    first, last = points[0], points[-1]
    longest = max(points, key=lambda point: point.waiting)
    if not longest.waiting:
        said = "Nobody waited."
    else:
        # Who stands behind the head of the queue waits for what the head waits for.
        causes = [pair for pair in longest.waiting_by if pair[0] != Cause.BEHIND_HEAD]
        cause = f" for {name_of(Cause, max(causes, key=lambda pair: pair[1])[0])}" if causes else ""
        said = (
            f"{counted(longest.waiting, 'request')} waited{cause} at {clock_time(longest.at_ns)};"
            f" {first.waiting:,} at the beginning, {last.waiting:,} at the end."
        )
    before = dict(first.limits)
    bound = {limit: steps - before.get(limit, 0) for limit, steps in last.limits}
    steps = sum(bound.values())
    limit = max(bound, key=bound.__getitem__, default=Limit.NONE)
    if limit != Limit.NONE and bound[limit] > 0:
        said += f" {percent(bound[limit] / steps)} of {counted(steps, 'step')} were bound by {name_of(Limit, limit)}."
    return said


def _findings_in_words(findings: Sequence[FindingReport]) -> str:
    told = [f"{finding.code}: {finding.explanation}" for finding in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        told.append(f"{counted(len(findings) - MOST_FINDINGS, 'more finding')} touched this window.")
    return " ".join(told)


def _clock(stamp: str | None) -> str:
    """The clock part of an RFC 3339 stamp, with milliseconds."""
    return stamp[11:23] if stamp else "?"
