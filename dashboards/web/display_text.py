"""Numbers, times and requests as the page writes them. Times are RFC 3339, and UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from kvscope.monitor.base.text import counted, duration, in_words
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.questions.schema import EngineView, LatencyView, RequestView, SlowView

NOT_RECEIVED: Final = ("silent", "stopped", "gone")
"""Statuses of engines of which nothing is received any more."""


def clock_text(at: str | None) -> str:
    """Return `14:02:11` of a time, or `an unknown time` for None."""
    return at[11:19] if at else "an unknown time"


def day_and_clock(at: str | None) -> str:
    """Return `2026-11-21 14:02:11 UTC` of a time, or an empty string for None."""
    return f"{at[:10]} {clock_text(at)} UTC" if at else ""


def age(since: str | None, now: str | None) -> str:
    """Return how long ago `since` was at `now`, as `31 s`, or an empty string if either is not known."""
    if since is None or now is None:
        return ""
    return duration((datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds())


def sentence(text: str) -> str:
    """Return the text as a sentence. A name at its beginning stays unchanged."""
    first = text.partition(" ")[0]
    return (text[:1].upper() + text[1:] if first.isalpha() else text).removesuffix(".") + "."


def number_text(value: float | None, unit: str = "", none: str = "not exposed") -> str:
    """Return a number with its unit, or `none` for None, which is not 0."""
    if value is None:
        return none
    return f"{value:,.0f} {unit}".rstrip()


def latency_text(latency: LatencyView | None) -> str:
    """Return the 95th percentile, or for None that no request is in it."""
    return duration(latency.p95_s) if latency is not None else "none in 5 min"


def latency_note(latency: LatencyView | None) -> str:
    """Return the median, and of how many requests."""
    if latency is None:
        return ""
    return f"p50 {duration(latency.p50_s)}, {counted(latency.requests, 'request')}"


def slow_text(slow: SlowView) -> str:
    """Return the time that clients of a slow engine wait, and the usual time."""
    return (
        f"half of its requests wait {duration(slow.p50_s)} or longer for the first token, where 95 % used to wait"
        f" {duration(slow.usual_p95_s)} at most ({counted(slow.usual_of, 'earlier request')})"
    )


def is_unread(engine: EngineView) -> bool:
    """Whether the reader behind the engine does not work: nothing about the engine now is known."""
    return engine.status == "unknown" and (engine.signal == "stream" or engine.running is not None)


def no_rate(engine: EngineView) -> str:
    """Return what stands for a missing rate: a dash where nothing is received, or the reason, that its metrics lack it
    or that the engine has just begun.
    """
    if engine.status in NOT_RECEIVED or is_unread(engine):
        return "–"
    return "not exposed" if engine.signal == "metrics" else "not known"


def rate_note(engine: EngineView) -> str:
    """Return the time that a rate is of, or an empty string without a rate."""
    if engine.output_tokens_per_s is None:
        return ""
    return "since the scrape before" if engine.signal == "metrics" else "over the last seconds"


def spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Block ids as (first, last) of each unbroken run, in order."""
    runs: list[tuple[int, int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs


def reason_of(request: RequestView) -> str:
    """Return the reason that goes with its state, with the number of blocks for a request that waits for blocks."""
    if request.reason == "KV_BLOCKS" and request.blocks_needed:
        return f"{in_words(request.reason)}, needs {request.blocks_needed:,}"
    return in_words(request.reason) if request.reason else ""


def pool_full_in(findings: Sequence[FindingReport]) -> tuple[str, str]:
    """Return when the pool will be full of blocks that do not return, and the band for 9 in 10, or empty strings
    without a forecast.
    """
    for finding in findings:
        forecast = finding.harm.forecast if finding.harm else None
        if forecast is not None:
            band = f"9 in 10: {duration(forecast.earliest_s)} to {duration(forecast.latest_s)}"
            return duration(forecast.full_in_s), band
    return "", ""


def queue_reasons(engine: EngineView) -> str:
    """How many requests wait for each reason, the most first."""
    most = sorted(engine.waiting_by_reason.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count:,} {in_words(reason)}" for reason, count in most)


def family_of(request: RequestView) -> str:
    """Return the block state that blocks of this request are in, as a class of the style sheet, or `none` if it holds
    none.
    """
    if request.reason == "UNACCOUNTED":
        return "unaccounted"
    if request.state.startswith("FINISHED"):
        return "finished" if request.blocks else "none"
    return "running" if request.state == "RUNNING" else "waiting"
