"""sizing.overload: more requests arrive than a full pool completes, so that the queue grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...base.text import clock_time, counted, duration, percent
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ..advice import metrics_dialect, seen_by
from ..detector import Detector, FromMetrics, SampleNeed, Settings, Threshold
from ..judgement import Evidence, Judgement
from ..leak.usage_series import connector_knowledge
from ..preemptions import FULL_AT
from ..sample_math import QueueCourse, RateInTime, apart_s, for_room, fullest_pool, scrape_interval_s

OVERLOAD_WINDOW_S = Threshold(180, "s", "three scrapes of a Prometheus server at 60 s: a burst grows in one of them")


class Overload(FromMetrics, Detector[Judgement]):
    """A queue that grows before a full pool.

    Sees: a queue that grows in each third of a window of minutes, by more than chance, with the pool full.
    Likely when: twice as many requests ended as run at once, and one that arrives now waits for long.
    Cannot tell: completions became slower: requests may be longer, steps slower, or a leak may hold blocks.
    Not when: the queue may wait for KV from elsewhere, or a burst is over soon.
    """

    code = "sizing.overload"
    severity = "warning"
    title = "More requests arrive than the pool can serve"
    sample_need = SampleNeed(
        4, OVERLOAD_WINDOW_S, "the queue grows with the pool full, and twice as many requests ended as run at once"
    )

    window_s = OVERLOAD_WINDOW_S
    longest_window_s = Threshold(1800, "s", "rates of longer ago are those of another load")
    min_turnover = Threshold(
        2, "times", "until each place was given twice, a queue also grows while long requests fill the pool"
    )
    min_wait_s = Threshold(30, "s", "a request that arrives now waits at least this long. A shorter queue is normal")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the rates, if the queue grows."""
        last = ledger.samples[-1]
        if last.deferred is None and connector_knowledge(ledger) == "consumer":
            return  # it may wait for KV from elsewhere, and does not show how much of the queue does
        course = self._growing(ledger.samples, settings)
        if course is not None:
            yield self._overload(ledger, course, settings)

    def _growing(self, samples: Sequence[Sample], settings: Settings) -> QueueCourse | None:
        """Return the longest window up to now in which the queue grew steadily."""
        queued = _queued_at_end(samples, settings(self.longest_window_s))
        span_s, found = settings(self.window_s), None
        while queued and (apart_s(queued[0], queued[-1]) or 0.0) >= span_s:
            start = next(n for n in range(len(queued) - 1, -1, -1) if (apart_s(queued[n], queued[-1]) or 0.0) >= span_s)
            course = QueueCourse(queued[start:])
            found = course if self._is_overload(course, settings) else found
            span_s *= 2
        return found

    def _is_overload(self, course: QueueCourse, settings: Settings) -> bool:
        if not course.grows() or course.usage < settings(FULL_AT):
            return False
        at_once = max(sample.running or 0 for sample in course.samples)
        if course.finished < settings(self.min_turnover) * max(at_once, 1):
            return False
        return _wait_s(course) >= settings(self.min_wait_s)

    def _overload(self, ledger: EngineLedger, course: QueueCourse, settings: Settings) -> Judgement:
        first, last = course.samples[0], course.samples[-1]
        arrivals, completions, slower = course.arrivals(), course.completions(), course.slows_down()
        need = self.sample_need.text(settings, scrape_interval_s(course.samples))
        return self.finding(
            ledger,
            verdict="cannot-tell" if slower else "likely",
            since_ns=first.at_ns or 0,
            position=first.position,
            evidence=_rate_evidence(course, arrivals, completions),
            case="SGLang" if metrics_dialect(ledger) == "sglang" else "",
            explanation=(
                f"Since {clock_time(first.at_ns or 0)} requests arrive at {arrivals.text()} and complete at"
                f" {completions.text()}, with {fullest_pool(last).name} at {percent(course.usage)}: the queue grew from"
                f" {for_room(first):,} to {counted(for_room(last), 'request')}, and a request that arrives now waits"
                f" about {duration(_wait_s(course))}. "
                + (
                    "Completions slowed down meanwhile, so requests may be longer, steps slower, or blocks may be held"
                    " by no live request."
                    if slower
                    else "At the current request lengths, the queue stops growing at an arrival rate of"
                    f" {completions.text()}."
                )
            ),
            missing=(
                "whether the load is a batch that may queue or clients that time out and retry, and whether a leak has"
                f" shrunk the pool: {seen_by(ledger)}" + (f". {need}" if slower else "")
            ),
        )


def _queued_at_end(samples: Sequence[Sample], longest_s: float) -> list[Sample]:
    """Return the last samples in which requests wait for room, with all inputs of the sums."""
    queued: list[Sample] = []
    for sample in reversed(samples):
        known = None not in (sample.at_ns, sample.finished, sample.usage, sample.running)
        if not known or not for_room(sample) or (queued and (apart_s(sample, queued[0]) or 0.0) > longest_s):
            break
        queued.append(sample)
    queued.reverse()
    return queued


def _wait_s(course: QueueCourse) -> float:
    """How long a request that arrives now will wait at the rate at which requests end."""
    return for_room(course.samples[-1]) * course.seconds / max(course.finished, 1)


def _rate_evidence(course: QueueCourse, arrivals: RateInTime, completions: RateInTime) -> tuple[Evidence, ...]:
    first, last = course.samples[0], course.samples[-1]
    source, span = last.source, f"{first.position} to {last.position}"
    rates = {"arrival_rate": arrivals, "completion_rate": completions}
    return (
        *(
            Evidence(f"{name}{ending}", round(value, 4), "requests/s", source, span)
            for name, each in rates.items()
            for ending, value in (("", each.rate), ("_low", each.bounds.low), ("_high", each.bounds.high))
        ),
        Evidence("waiting_first", for_room(first), "requests", source, first.position),
        Evidence("waiting", for_room(last), "requests", source, last.position),
        Evidence("running", last.running or 0, "requests", source, last.position),
        Evidence("usage", round(100 * course.usage, 1), "%", source, span),
        Evidence("queue_wait_s", round(_wait_s(course), 1), "s", source, span),
    )
