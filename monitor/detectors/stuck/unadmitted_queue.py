"""A queue that stands still with room in the pool, by an engine's counters: stuck.head-of-line from metrics.

    admitted = finished + the change of running

An engine that admits nothing for minutes, runs fewer than before and goes on generating has a head of the queue that it
cannot admit. Prompts that enter show in the count of prompt tokens, and preemptions in their own. A long prompt whose
chunks take all of each step's tokens generates nothing, or raises usage by more than the tokens that are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvscope.monitor.analysis.demand import capacity_tokens, number_fact
from kvscope.monitor.detectors.arrival_rates import for_room, moved
from kvscope.monitor.detectors.judgement import Evidence, ShortOfBlocks
from kvscope.monitor.detectors.sample_math import FEWEST_SAMPLES, apart_s
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.stuck.sample_windows import scrape_interval_s
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, duration, percent

UNADMITTED_S = Threshold(
    120, "s", "where only metrics are known: as long as where the stream shows it, and three samples at 60 s"
)
MIN_ROOM = Threshold(
    0.25, "of the pool", "where only metrics are known: a head that needs less than this would have been admitted"
)
LEAST_WAITING = 2
"""The head, and one that it holds back."""
HEAD_OF_LINE_NEED = SampleNeed(
    FEWEST_SAMPLES, UNADMITTED_S, "two or more requests wait, a quarter of the pool is free, and none is admitted"
)


class UnadmittedQueue(NamedTuple):
    """The last window in which requests waited, others ran, and none was admitted."""

    samples: Sequence[Sample]

    @property
    def seconds(self) -> float:
        """From the first sample to the last."""
        return apart_s(self.samples[0], self.samples[-1]) or 0.0

    @property
    def steps(self) -> float:
        """Steps completed meanwhile, or tokens generated for each request where steps are not exposed."""
        first, last = self.samples[0], self.samples[-1]
        if last.steps is not None:
            return moved(first.steps, last.steps)
        most = max(sample.running or 0 for sample in self.samples)
        return moved(first.generation_tokens, last.generation_tokens) / max(most, 1)


def unadmitted_queue(samples: Sequence[Sample], settings: Settings) -> UnadmittedQueue | None:
    """Return the window, None if there is none at the end."""
    start = len(samples)
    while start > 0 and _waits_beside_room(samples[start - 1], settings):
        if start < len(samples) and not _admits_nothing(samples[start - 1], samples[start]):
            break
        start -= 1
    return UnadmittedQueue(samples[start:]) if len(samples) - start >= FEWEST_SAMPLES else None


def _waits_beside_room(sample: Sample, settings: Settings) -> bool:
    return (
        for_room(sample) >= LEAST_WAITING
        and bool(sample.running)
        and sample.usage is not None
        and sample.usage <= 1 - settings(MIN_ROOM)
        and sample.at_ns is not None
    )


def _admits_nothing(before: Sample, after: Sample) -> bool:
    """Whether no request can have been admitted between the two. Without the counters that show it, none is claimed."""
    if after.finished is None or after.prompt_tokens_per_s is None:
        return False
    admitted = (after.running or 0) - (before.running or 0) + moved(before.finished, after.finished)
    return admitted <= 0 and not after.prompt_tokens_per_s and not moved(before.preemptions, after.preemptions)


def head_of_line_by_samples(
    ledger: EngineLedger, code: str, min_steps: float, settings: Settings, wont_help: tuple[str, ...]
) -> ShortOfBlocks | None:
    """Return the judgement by the samples, or None if they do not show it."""
    if not _waits_beside_room(ledger.samples[-1], settings):
        return None
    found = unadmitted_queue(list(ledger.samples), settings)
    least_s = settings(UNADMITTED_S)
    if found is None or found.seconds < least_s / 2 or found.steps < min_steps or _has_another_cause(ledger, found):
        return None
    first, last = found.samples[0], found.samples[-1]
    possible = _other_causes(ledger, found)
    pending = found.seconds < least_s
    need = HEAD_OF_LINE_NEED.text(settings, scrape_interval_s(found.samples))
    return ShortOfBlocks(
        code=code,
        engine=ledger.engine,
        verdict="cannot-tell" if possible else "likely",
        severity="info" if possible else None,
        pending=pending,
        since_ns=first.at_ns or 0,
        position=first.position,
        blocks_needed=0,
        blocks_free_for_it=0,
        evidence=_queue_evidence(found),
        explanation=(
            f"For {duration(found.seconds)}, since {clock_time(first.at_ns or 0)}, the engine has admitted none of"
            f" {counted(for_room(last), 'request')} waiting, with {percent(1 - (last.usage or 0.0))} of the pool"
            f" free and {counted(last.running or 0, 'request')} running. A request at the head of the queue that"
            " needs more blocks than are free holds back the others like this. "
            + (
                f"Metrics cannot exclude: {'; '.join(possible)}."
                if possible
                else "The engine generates tokens, ran more requests before, and computes no long prompt meanwhile:"
                " usage grew by no more than the tokens that it generated."
            )
        ),
        do_now=("Find the request that has waited longest. If it is not urgent, abort it and resend it later.",),
        change=(
            "Send long requests to a separate engine, so that short ones do not queue behind them.",
            "--scheduling-policy priority, and a higher priority value for requests that need many blocks.",
            "Enlarge the pool (--kv-cache-memory-bytes, a higher --gpu-memory-utilization).",
        ),
        wont_help=wont_help,
        missing="how many blocks the first request needs: attach the event stream (monitor doctor tcp://HOST:5757)"
        + (f". {need}" if possible or pending else ""),
    )


def _has_another_cause(ledger: EngineLedger, found: UnadmittedQueue) -> bool:
    """Whether the engine runs as many as it ever did, or computes a long prompt."""
    first, last = found.samples[0], found.samples[-1]
    limit = number_fact(ledger.facts, "max_num_seqs") or max(sample.running or 0 for sample in ledger.samples)
    generated = moved(first.generation_tokens, last.generation_tokens)
    if (last.running or 0) >= limit or not generated:
        return True
    # Each running request may begin a block, of which its tokens fill a part.
    rounding = (number_fact(ledger.facts, "block_size") or 0) * (first.running or 0)
    rise = ((last.usage or 0.0) - (first.usage or 0.0)) * (capacity_tokens(ledger.facts) or 0)
    return rise > generated + rounding


def _other_causes(ledger: EngineLedger, found: UnadmittedQueue) -> list[str]:
    """Causes of the same picture that these metrics do not exclude."""
    possible = []
    if found.samples[-1].deferred is None:
        possible.append("a wait for something other than blocks (LoRA slots, a grammar, KV from elsewhere)")
    if capacity_tokens(ledger.facts) is None:
        possible.append("a long prompt whose chunks take all of each step's tokens")
    return possible


def _queue_evidence(found: UnadmittedQueue) -> tuple[Evidence, ...]:
    first, last = found.samples[0], found.samples[-1]
    source, span = last.source, f"{first.position} to {last.position}"
    return (
        Evidence("waiting", for_room(last), "requests", source, last.position),
        Evidence("running", last.running or 0, "requests", source, last.position),
        Evidence("usage", round(100 * (last.usage or 0.0), 1), "%", source, last.position),
        Evidence("admitted", 0, "requests", source, span),
        Evidence("finished", moved(first.finished, last.finished), "requests", source, span),
        Evidence("steps", round(found.steps), "steps", source, span),
        Evidence("duration_s", round(found.seconds, 1), "s", source, span),
    )
