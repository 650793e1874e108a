"""Events that an engine counts on its metrics page, of which each may be a client's harm, such as transfers that fail.

A counter says how many there were since the engine started, and not when. So as long as the page has been watched for
less than the window, all of them count, and then those of the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from ..base.text import counted, duration
from ..contract.samples import Sample
from .detector import Settings, Threshold
from .judgement import Evidence, Severity
from .sample_math import apart_s, moved

EVENTS_WINDOW_S: Final = Threshold(
    600, "s", "of what an engine counts: two that are minutes apart belong to the same incident"
)
MIN_EVENTS: Final = Threshold(3, "events", "where an engine only counts them: one or two are clients that disconnected")
MIN_EVENT_SHARE: Final = Threshold(
    0.01, "of the requests", "that ended meanwhile: of a hundred clients more than one notices it"
)
EventCounter = Literal["failed_transfers", "expired_leases", "late_reads", "tier_refusals"]
"""Fields of a sample."""


def is_few(number: int, ended: int, settings: Settings) -> bool:
    """Return whether they are information, while so many requests ended."""
    return number < settings(MIN_EVENTS) or number < settings(MIN_EVENT_SHARE) * ended


class CountedEvents(NamedTuple):
    """Events of one counter. `ended` are the requests that ended meanwhile, -1 where that is not exposed. `began` is
    the last sample before the first of them, None if they began before the page was watched. `span_s` is the window, 0
    if they count from the engine's start on.
    """

    name: EventCounter
    number: int
    ended: int
    began: Sample | None
    last: Sample
    span_s: float

    def when(self) -> str:
        """Return over which time they were counted, for a sentence."""
        return f"in the last {duration(self.span_s)}" if self.span_s else "since it started"

    def severity(self, settings: Settings) -> Severity | None:
        """Return info for few of them, and else None: that of the code."""
        return "info" if is_few(self.number, self.ended, settings) else None

    def since_ns(self) -> int:
        """Return since when there were any, 0 if that is not known."""
        return (self.began.at_ns or 0) if self.began is not None else 0

    def evidence(self, unit: str) -> tuple[Evidence, ...]:
        """Return the counts."""
        source, position = self.last.source, self.last.position
        ended = (Evidence("requests_ended", self.ended, "requests", source, position),) if self.ended >= 0 else ()
        return (Evidence(self.name, self.number, unit, source, position), *ended)

    def of_requests(self) -> str:
        """Return how many requests ended meanwhile, for a sentence, or nothing if that is not exposed."""
        return f", while {counted(self.ended, 'request')} ended" if self.ended >= 0 else ""


def counted_events(samples: Sequence[Sample], name: EventCounter, settings: Settings) -> CountedEvents | None:
    """Return the events of a counter, or None if there were none or it is not exposed."""
    if not samples or not getattr(samples[-1], name):
        return None
    last = samples[-1]
    window_s = settings(EVENTS_WINDOW_S)
    before = next((one for one in reversed(samples) if (apart_s(one, last) or 0.0) >= window_s), None)
    count = moved(getattr(before, name), getattr(last, name)) if before is not None else getattr(last, name)
    if count <= 0:
        return None
    until = (getattr(before, name) or 0) if before is not None else 0
    began = next((one for one in reversed(samples) if (getattr(one, name) or 0) <= until), None)
    ended = -1
    if last.finished is not None:
        ended = last.finished + (last.aborted or 0)
        if before is not None:
            ended -= (before.finished or 0) + (before.aborted or 0)
    return CountedEvents(name, count, ended, began, last, window_s if before is not None else 0.0)
