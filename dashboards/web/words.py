"""Numbers and times as the page writes them. Times are RFC 3339 as the query interface gives them, and UTC."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime


def clock(at: str | None) -> str:
    """`14:02:11` of a time; `an unknown time` for None."""
    return at[11:19] if at else "an unknown time"


def age(since: str | None, now: str | None) -> str:
    """How long ago `since` was at `now`, as `31 s`; empty if either is not known."""
    if since is None or now is None:
        return ""
    return duration((datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds())


def duration(seconds: float) -> str:
    """How long: `0.4 s`, `31 s`, `12 min`, `3 h 10 min`, `2 d 4 h`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def number(value: float | None, unit: str = "") -> str:
    """A figure with its unit; `not exposed` for None, which is not 0."""
    if value is None:
        return "not exposed"
    return f"{value:,.0f} {unit}".rstrip()


def share(part: float, whole: float) -> str:
    """`12.5 %` of a whole; never 0.0 % unless it is."""
    value = 100 * part / whole if whole else 0.0
    return "< 0.1 %" if 0 < value < 0.05 else f"{value:.1f} %"


def counted(count: int, noun: str) -> str:
    """`1 block`, `2,048 blocks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Block ids as (first, last) of each unbroken run, in order."""
    runs: list[tuple[int, int]] = []
    for value in sorted(numbers):
        if runs and value == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], value)
        else:
            runs.append((value, value))
    return runs
