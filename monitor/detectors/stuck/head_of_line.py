"""stuck.head-of-line: the head of the queue waits for blocks, and the room meanwhile would do for those behind it.

One head that waits for minutes, or several one after the other that together take much of the requests' time. From
metrics, by a queue that stands still beside a pool with room:

    admitted = finished + the change of running

An engine that admits nothing for minutes, runs fewer than before and goes on generating has a head of the queue that it
cannot admit. Prompts that enter show in the count of prompt tokens, and preemptions in their own. A long prompt whose
chunks take all of each step's tokens generates nothing, or raises usage by more than the tokens that are generated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ...base.text import clock_time, counted, duration, percent
from ...contract.samples import Sample
from ...ledger.demand import capacity_tokens, number_fact
from ...ledger.engine_ledger import EngineLedger
from ...ledger.queue_state import HeldBackTime, Living, fitting_together, requests_behind
from ...ledger.records import RequestState
from ..detector import FromMetrics, SampleNeed, Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s
from ..judgement import ENGINE_PAUSED, NO_WORK, Alternative, Evidence, ShortOfBlocks, seen
from ..sample_math import FEWEST_SAMPLES, apart_s, for_room, moved, scrape_interval_s
from .waiting_requests import head_short_of_blocks, missing_after_loss

UNADMITTED_S = Threshold(
    120, "s", "where only metrics are known: as long as where the stream shows it, and three samples at 60 s"
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
        and sample.usage <= 1 - settings(HeadOfLine.min_room)
        and sample.at_ns is not None
    )


def _admits_nothing(before: Sample, after: Sample) -> bool:
    """Whether no request can have been admitted between the two. Without the counters that show it, none is claimed."""
    if after.finished is None or after.prompt_tokens_per_s is None:
        return False
    admitted = (after.running or 0) - (before.running or 0) + moved(before.finished, after.finished)
    return admitted <= 0 and not after.prompt_tokens_per_s and not moved(before.preemptions, after.preemptions)


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


MORE_POOL: Final = "(--kv-cache-memory-bytes, a higher --gpu-memory-utilization)."
WINDOW_MISSING: Final = (
    "how many blocks the engine would have asked for those behind: until it reaches one, only its prompt is known, and"
    " an engine may reserve more than that"
)


class HeadOfLine(StreamDetector[ShortOfBlocks]):
    """One request that needs many blocks holds back others that would fit.

    Sees: a head of the queue that is short of blocks, while requests behind it would fit in those that are free.
    Confirmed when: one head has waited for minutes and many steps.
    Likely when: several heads in turn cost a tenth of all requests' time: what those behind need is then an estimate.
    Not when: the pool never has as many blocks (stuck.never-fits); little of it is free.
    """

    code = "stuck.head-of-line"
    severity = "warning"
    title = "A large request at the head of the queue holds back others that would fit"
    sample_need = HEAD_OF_LINE_NEED

    grace_s = Threshold(
        120,
        "s",
        "first come, first served is the rule, and a large request waits for others to end, but not for minutes",
    )
    idle_grace_s = Threshold(
        30,
        "s",
        "with nothing running no step frees a block: it waits for a transfer, as stuck.remote-load does for so long",
    )
    min_steps = Threshold(50, "steps", "so many times others may end and give the head their blocks, at any pace")
    min_free = Threshold(0.1, "of the pool", "less room is no loss to those that wait")
    min_heads = Threshold(3, "requests", "one or two that wait for less are large requests met by chance")
    min_lost = Threshold(
        0.1, "of the time", "of all requests' time in the pending period: clients notice when a tenth of it is lost"
    )
    unadmitted_s = UNADMITTED_S
    min_room = Threshold(
        0.25, "of the pool", "where only metrics are known: a head that needs less than this would have been admitted"
    )
    alternatives = (NO_WORK, ENGINE_PAUSED, Alternative("no room for any request", "requests behind it fit"))

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield the head of the queue if those that hold the pool keep it waiting."""
        head = head_short_of_blocks(ledger)
        found = list(self._judge_head(ledger, settings, ledger.living(), head)) if head is not None else []
        if not found or found[0].pending:
            found = list(self._judge_window(ledger, settings)) or found
        yield from found

    def _judge_window(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Heads of the queue, one after the other, that held others back for a part of all requests' time."""
        window_s = at_pace_s(ledger, settings, self.grace_s, self.min_steps)
        lost = ledger.held_back.over(window_s, ledger.step_times.longest_s)
        least, fewest = settings(self.min_lost), settings(self.min_heads)
        if lost is None or len(lost.heads) < fewest:
            return
        # Time that is not known counts as time without a loss: it would be a tenth even then.
        if lost.lost_s < least * lost.present_s * window_s / lost.span_s or lost.seconds < least * window_s:
            return
        worst, usable = lost.worst, ledger.state.total - ledger.state.reserved
        share = lost.lost_s / lost.present_s
        heads = counted(len(lost.heads), "request")
        yield self.short_of_blocks(
            ledger,
            since_ns=ledger.wall(lost.since.at_ns),
            position=ledger.at(lost.since.refused_at),
            requests=lost.heads,
            blocks_needed=worst.needed,
            blocks_free_for_it=worst.free,
            evidence=_window_evidence(ledger, lost, share),
            explanation=(
                f"In the last {duration(lost.span_s)}, requests that would have fitted lost {percent(share)} of all"
                f" requests' time behind a head of the queue that did not fit: {heads} blocked the queue one after the"
                f" other, for {duration(lost.seconds)} in all. {worst.head} needed {counted(worst.needed, 'block')}"
                f" where {worst.free:,} ({percent(worst.free / max(usable, 1))} of the pool) were free, and held back"
                f" {counted(worst.held_back, 'request')} that would have fitted together."
            ),
            case="Several heads, one after the other",
            missing=missing_after_loss(ledger) or WINDOW_MISSING,
        )

    def _judge_head(
        self, ledger: EngineLedger, settings: Settings, living: Living, head: RequestState
    ) -> Iterator[ShortOfBlocks]:
        """Judge a head that waits for others to free blocks. In the room that it leaves unused, those behind could
        run.
        """
        state, at = ledger.state, ledger.at
        began_ns = max(head.since_ns, state.mode_since_ns)
        age = (ledger.looked_ns - began_ns) / 1e9
        grace = (
            at_pace_s(ledger, settings, self.grace_s, self.min_steps)
            if living.running
            else at_pace_s(ledger, settings, self.idle_grace_s)
        )
        # With enough free for it, the engine's count is another, which findings of a broken account are about.
        if age < grace / 2 or not settings(self.min_free) * state.usable <= state.free < head.blocks_needed:
            return
        behind = requests_behind(living, head)
        certain = state.is_certain_request
        counted_right = not state.damaged or ledger.used_by_engine == state.used
        known = counted_right and certain(head) and (ledger.looked_ns - state.lost_ns) / 1e9 >= grace
        behind = [record for record in behind if certain(record)] if known else behind
        fitting = fitting_together(state, ledger.description, behind, len(living.running))
        if not fitting:
            return
        own = max(head.blocks_to_admit, -(-(head.prompt_tokens + head.output_tokens) // max(1, state.block_size)))
        yield self.short_of_blocks(
            ledger,
            pending=age < grace or not known,
            since_ns=ledger.wall(began_ns),
            position=at(head.since_at),
            requests=(head.id,),
            blocks_needed=head.blocks_needed,
            blocks_free_for_it=head.blocks_free_then,
            evidence=_head_evidence(ledger, head, own, age, (len(behind), len(fitting), len(living.running))),
            explanation=(
                f"For {duration(age)} request {head.id} has stood at the head of the queue: it needs"
                f" {counted(head.blocks_needed, 'block')} and {state.free:,} ({percent(state.free / state.usable)} of"
                f" the pool) are free. {counted(len(fitting), 'request')} behind it would fit in these, first"
                f" {fitting[0].id}, but {'waits' if len(fitting) == 1 else 'wait'} for it."
            ),
            numbers={
                "If it is": f"If {head.id} is",
                MORE_POOL: MORE_POOL
                if head.blocks_needed <= own
                else f"{MORE_POOL} Its current tokens need only {own:,}: the engine requires more before it admits a"
                " request, so a lower max_tokens admits it earlier.",
            },
            missing=missing_after_loss(ledger),
        )


def _head_evidence(
    ledger: EngineLedger, head: RequestState, own: int, age: float, counts: tuple[int, int, int]
) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    behind, fitting, running = counts
    return (
        seen("blocks_needed", head.blocks_needed, "blocks", at(head.refused_at)),
        seen("blocks_free_for_it", head.blocks_free_then, "blocks", at(head.refused_at)),
        seen("blocks_free", state.free, "blocks", at(state.places.pool)),
        seen("blocks_for_own_tokens", own, "blocks", at(head.arrived_at)),
        seen("share_free", round(state.free / state.usable, 4), "of the pool", at(state.places.pool)),
        seen("waiting_behind", behind, "requests", at(state.places.moved)),
        seen("waiting_that_fit", fitting, "requests", at(state.places.moved, state.places.pool)),
        seen("running", running, "requests", at(state.places.moved)),
        seen("waited_s", round(age, 1), "s", at(head.since_at)),
    )


def _window_evidence(ledger: EngineLedger, lost: HeldBackTime, share: float) -> tuple[Evidence, ...]:
    at, refused_at = ledger.at, ledger.at(lost.worst.refused_at)
    moved_at = at(ledger.state.places.moved)
    return (
        seen("blocks_needed", lost.worst.needed, "blocks", refused_at),
        seen("blocks_free_for_it", lost.worst.free, "blocks", refused_at),
        seen("waiting_that_fit", lost.worst.held_back, "requests", refused_at),
        seen("heads_short_of_blocks", len(lost.heads), "requests", refused_at),
        seen("held_back_s", round(lost.seconds, 1), "s", moved_at),
        seen("request_seconds_lost", round(lost.lost_s, 1), "request-seconds", moved_at),
        seen("request_seconds", round(lost.present_s, 1), "request-seconds", moved_at),
        seen("share_of_time_lost", round(share, 4), "of the time", moved_at),
    )


class HeadOfLineFromMetrics(FromMetrics, HeadOfLine):
    """A queue that stands still beside a pool with room.

    Sees: requests wait for minutes and none is admitted, while others run and a quarter of the pool is free.
    Likely when: the metrics exclude other waits and a long prompt.
    Cannot tell: the page does not expose why requests wait, or how many tokens the pool holds.
    Not when: as many run as ever did, or a long prompt takes all of each step.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[ShortOfBlocks]:
        """Yield a queue that stands still beside a pool with room."""
        if not _waits_beside_room(ledger.samples[-1], settings):
            return
        found = unadmitted_queue(ledger.samples, settings)
        least_s = settings(self.unadmitted_s)
        if (
            found is None
            or found.seconds < least_s / 2
            or found.steps < settings(self.min_steps)
            or _has_another_cause(ledger, found)
        ):
            return
        first, last = found.samples[0], found.samples[-1]
        possible = _other_causes(ledger, found)
        pending = found.seconds < least_s
        need = self.sample_need.text(settings, scrape_interval_s(found.samples))
        yield self.short_of_blocks(
            ledger,
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
            case="From metrics",
            missing="how many blocks the first request needs: attach the event stream (monitor doctor tcp://HOST:5757)"
            + (f". {need}" if possible or pending else ""),
        )
