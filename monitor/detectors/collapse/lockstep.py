"""collapse.lockstep: usage falls from full to nothing as alike requests end together, and the next wave queues."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Reversible, Sequence
from operator import attrgetter
from typing import Final

from ...base.text import clock_time, counted, duration, percent
from ...contract.kinds import Cause, Status
from ...contract.samples import Sample
from ...ledger.demand import Demand, capacity_at, capacity_tokens, demands, number_fact, steps_text, tokens_per_request
from ...ledger.engine_ledger import EngineLedger, Point
from ...ledger.records import RequestState
from ..advice import SMALLER_BUDGET, smaller_budget
from ..detector import FromSamples, Known, SampleNeed, Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s, mean_step_s
from ..judgement import Alternative, Evidence, Judgement, seen
from ..preemptions import LOST_EVENTS
from ..sample_math import apart_s, for_room, prompt_tokens_until
from .usage_fall import (
    before_fall,
    chance_within,
    counter_moved,
    end_together_by_chance,
    generations_passed,
    is_new_work,
)

# As plain numbers: comparing with an IntEnum's member costs several times as much, and all that ended are checked.
NATURAL_ENDS: Final = frozenset((int(Status.FINISHED_STOPPED), int(Status.FINISHED_LENGTH_CAPPED)))
FINISHED_NS: Final = attrgetter("finished_ns")


def ended_since_pause(ended: Reversible[RequestState], since_ns: int, within_ns: float) -> list[RequestState]:
    """Return the natural ends from which each burst since `since_ns` is the one that it is from the first end on: those
    after a pause longer than a burst, or all. `ended` has the latest last. This runs at every judgement, so it reads no
    further back than the pause.
    """
    recent: list[RequestState] = []
    for record in reversed(ended):
        if record.status not in NATURAL_ENDS:
            continue
        if record.finished_ns <= since_ns and (not recent or recent[-1].finished_ns - record.finished_ns > within_ns):
            break
        recent.append(record)
    recent.reverse()  # those of one moment stay in their order
    recent.sort(key=FINISHED_NS)
    return recent


TOGETHER_BY_CHANCE: Final = (
    "whether these requests belong together: they did not run equally long, and over so many steps others end as close"
    " to each other now and then"
)
WAITS_OUTSIDE = frozenset((int(Cause.REMOTE_KV), int(Cause.GRAMMAR), int(Cause.STREAMING_INPUT), int(Cause.PAUSED)))
"""Waits that neither a place nor a block ends."""
PREEMPTIONS_HIDDEN = {
    "log": "vLLM's log cannot print preemptions",
    "metrics": "vLLM's own counter moves only with a preempted request's next token",
    "prometheus": "vLLM's own counter moves only with a preempted request's next token",
}


class Lockstep(StreamDetector[Judgement]):
    """Requests in lockstep that finish together.

    Sees: requests that held half of the pool end within a second, and most of a next wave waits for room.
    Confirmed when: all ended within two steps, or ran for equally many.
    Likely when: they ended over more steps, as others do by chance now and then.
    Not when: preemptions freed the blocks (collapse.preempt-all); no wave queues: then the load has ended.
    """

    code = "collapse.lockstep"
    severity = "warning"
    title = "Requests in lockstep finish together and the next wave queues"
    recurs = True

    within_s = Threshold(
        1,
        "s",
        "requests of one wave finish within a step of each other, and independent lengths spread the ends over seconds",
    )
    max_spread = Threshold(
        0.1,
        "of their duration",
        "requests that last a second finish within one by chance, and those in lockstep finish closer together",
    )
    min_requests = Threshold(
        4,
        "requests",
        "of four with independent lengths, 4 in 1,000 groups finish within a tenth of their duration by chance",
    )
    within_steps = Threshold(2, "steps", "steps that overlap end the requests of one wave in two steps")
    min_share = Threshold(0.5, "of the pool", "a smaller fall is ordinary traffic")
    next_wave_s = Threshold(30, "s", "it is an incident only if another wave queues. If none does, the load has ended")
    max_interval_s = Threshold(
        20, "s", "between samples further apart than that, requests that end one after the other look the same"
    )
    sample_need = SampleNeed(
        3,
        None,
        "usage falls from one sample to the next, and the wave that queued fills the pool again",
        max_interval_s,
    )
    remember_s = Threshold(120, "s", "waves that are minutes apart belong to the same incident")
    alternatives = (
        Alternative("requests that end together by chance", "their number, and how close together they ended"),
        Alternative("preemptions", "no preemption freed these blocks"),
        Alternative("a load that has ended", "the next wave was queued"),
    )

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the last burst after which a wave queued."""
        bursts = self._bursts(ledger, settings)
        for burst in reversed(bursts):
            wave = self._next_wave(ledger, settings, burst)
            if wave is not None:
                yield self._judge_burst(ledger, settings, burst, wave, bursts)
                return

    def _bursts(self, ledger: EngineLedger, settings: Settings) -> list[list[RequestState]]:
        """Return groups of requests that recently came to their natural end close together and held much of the
        pool.
        """
        remember_s, fewest = settings(self.remember_s), settings(self.min_requests)
        least = settings(self.min_share)
        within_ns = at_pace_s(ledger, settings, self.within_s, self.within_steps) * 1e9
        usable = max(1, ledger.state.total - ledger.state.reserved)
        since_ns = ledger.now_ns - round(remember_s * 1e9) - (ledger.wall(1) - 1)  # on the engine's clock
        ended = ended_since_pause(ledger.ended, since_ns, within_ns)
        times = [record.finished_ns for record in ended]
        bursts: list[list[RequestState]] = []
        first = 0
        while first < len(times):
            after = bisect_right(times, times[first] + within_ns, first)
            if after - first >= fewest and times[after - 1] > since_ns:
                bursts.append(ended[first:after])
            first = after
        return [
            burst
            for burst in bursts
            if sum([record.peak_blocks for record in burst]) / usable >= least
            and self._in_step(ledger, burst, settings)
            and self._fell(ledger, burst, settings)
        ]

    def _in_step(self, ledger: EngineLedger, burst: Sequence[RequestState], settings: Settings) -> bool:
        """Whether they ended close together compared with their run time: short ones end close together by chance.

        Requests that run for a few steps only end in the same one even more often, however long it is.
        """
        spread_s = (burst[-1].finished_ns - burst[0].finished_ns) / 1e9
        lives = [record.finished_ns - (record.admitted_ns or record.arrived_ns) for record in burst]
        life_s = statistics.median(lives) / 1e9
        if not life_s or spread_s > settings(self.max_spread) * life_s:
            return False
        within = max(spread_s, mean_step_s(ledger)) / life_s
        return chance_within(len(burst), within) <= self._least_chance(settings)

    def _least_chance(self, settings: Settings) -> float:
        """Return how often the fewest and the widest that count end together, if their lengths are independent."""
        return chance_within(round(settings(self.min_requests)), settings(self.max_spread))

    def _belong_together(self, burst: Sequence[RequestState], settings: Settings) -> bool:
        """Whether all requests ended within a few steps, or ran for nearly the same number of steps. The latter holds
        if the wave's prompts took several steps: its requests then end over as many.
        """
        ended = [record.ended_step for record in burst]
        ran = [record.ended_step - record.admitted_step for record in burst]
        return min(max(ended) - min(ended), max(ran) - min(ran)) < settings(self.within_steps)

    def _fell(self, ledger: EngineLedger, burst: Sequence[RequestState], settings: Settings) -> bool:
        """Whether most of what ran ended with the burst and the pool emptied, and by no preemption."""
        before, after = _around_burst(ledger, burst)
        if before is None or after is None or after.at_ns == before.at_ns:
            return False
        fall = (_blocks_in_use(before) - _blocks_in_use(after)) / max(1, before.balance.total - before.balance.reserved)
        return (
            fall >= settings(self.min_share)
            and after.running <= before.running / 4
            and after.preemptions == before.preemptions
        )

    def _next_wave(self, ledger: EngineLedger, settings: Settings, burst: Sequence[RequestState]) -> Point | None:
        """Return the point after the burst when most of a next wave waited with little running, if any.

        Once most of one runs, none waits for this burst: a later queue has come since.
        """
        end, most, emptied = _burst_end(ledger, burst), len(burst) / 2, False
        until = end + at_pace_s(ledger, settings, self.next_wave_s) * 1e9
        for point in (point for point in ledger.points if end < point.at_ns <= until):
            if max(most, point.running + 1) <= _queued_for_room(point):
                return point
            if emptied and point.running >= most:
                return None
            emptied = emptied or point.running < most  # the first points may still count those of the burst
        return None

    def _judge_burst(
        self,
        ledger: EngineLedger,
        settings: Settings,
        burst: Sequence[RequestState],
        wave: Point,
        bursts: Sequence[Sequence[RequestState]],
    ) -> Judgement:
        before, after = _around_burst(ledger, burst)
        assert before is not None
        assert after is not None
        before_at, after_at, wave_at = (str(point.position or "") for point in (before, after, wave))
        ended_at = ledger.at(*(record.since_at for record in burst))
        usable = before.balance.total - before.balance.reserved
        first, last = burst[0].finished_ns, burst[-1].finished_ns
        spread = (last - first) / 1e9
        freed = sum(record.peak_blocks for record in burst)
        together = self._belong_together(burst, settings)
        missing = LOST_EVENTS if ledger.state.damaged else "" if together else TOGETHER_BY_CHANCE
        return self.finding(
            ledger,
            since_ns=ledger.wall(first),
            position=ledger.at(burst[0].since_at),
            requests=tuple(record.id for record in burst),
            evidence=(
                seen("requests_finished_together", len(burst), "requests", ended_at),
                seen("within_s", round(spread, 3), "s", ended_at),
                seen("blocks_freed_by_finishing", freed, "blocks", ended_at),
                seen("preemptions", after.preemptions - before.preemptions, "preemptions", after_at),
                seen("usage_before", round(100 * _blocks_in_use(before) / usable, 1), "%", before_at),
                seen("usage_after", round(100 * _blocks_in_use(after) / usable, 1), "%", after_at),
                seen("next_wave_waiting", _queued_for_room(wave), "requests", wave_at),
                seen("next_wave_running", wave.running, "requests", wave_at),
                seen("collapses_seen", len(bursts), "times", ledger.at(*(r.since_at for r in bursts[-1]))),
            ),
            explanation=(
                f"At {clock_time(ledger.wall(first))}, {counted(len(burst), 'request')} finished within"
                f" {duration(spread)} of each other, by reaching their end and not by preemption, and freed"
                f" {counted(freed, 'block')}: usage fell from {percent(_blocks_in_use(before) / usable)} to"
                f" {percent(_blocks_in_use(after) / usable)}. The next wave then waited in the queue"
                f" ({_queued_for_room(wave)} waiting, {wave.running} running), its prompts computed one after the"
                " other. Similar requests that start together stay in lockstep."
            ),
            numbers={SMALLER_BUDGET: smaller_budget(ledger)},
            missing=missing,
        )


BURST_SHOWN_NS: Final = 2_000_000_000
"""Points of the recent past are at most a second apart, or a step."""


def _around_burst(ledger: EngineLedger, burst: Sequence[RequestState]) -> tuple[Point | None, Point | None]:
    """Return the point just before the burst, and the lowest one just after it."""
    first, last = ledger.wall(burst[0].finished_ns), _burst_end(ledger, burst)
    shown_ns = max(BURST_SHOWN_NS, ledger.step_times.longest_s * 1e9)
    before = None
    after = None
    for point in reversed(ledger.points):
        if point.at_ns < first:
            before = point
            break
        if last <= point.at_ns <= last + shown_ns and (after is None or _blocks_in_use(point) <= _blocks_in_use(after)):
            after = point
    return before, after


def _burst_end(ledger: EngineLedger, burst: Sequence[RequestState]) -> int:
    return ledger.wall(burst[-1].finished_ns)


def _blocks_in_use(point: Point) -> int:
    """Return what no request can be given, as usage counts it: what a finished request keeps has not come back."""
    balance = point.balance
    return balance.total - balance.reserved - balance.free - balance.cached_idle


def _queued_for_room(point: Point) -> int:
    """Return how many wait for a place or for blocks, and not for a grammar or for KV from elsewhere.

    Where the head is new, no pass has left those behind it waiting either: they came while a step ran.
    """
    others = WAITS_OUTSIDE
    if any(cause == Cause.NEW for cause, _ in point.waiting_by):
        others |= {Cause.NEW, Cause.BEHIND_HEAD}
    return point.waiting - sum(count for cause, count in point.waiting_by if cause in others)


class LockstepFromSamples(FromSamples, Lockstep):
    """A fall of usage after which a wave queues, at scrapes or lines of a log.

    Sees: usage and Running fall between samples at most 20 s apart, then requests wait and prompt tokens count again.
    Likely when: as many requests finished meanwhile.
    Cannot tell: a log does not show how requests ended. Clients that time out together and retry look the same.
    Not when: requests of independent lengths would end together so often by chance.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fall of usage after which a wave queued."""
        samples = self._remembered(ledger, settings)
        found = [
            (fall, wave)
            for fall in range(1, len(samples))
            if (samples[fall - 1].running or 0) > (samples[fall].running or 0)
            and (wave := self._wave_after(samples, fall, settings)) is not None
        ]
        if not found:
            return
        yield self._judge_fall(ledger, samples, *found[0], times=len(found))

    def _judge_fall(
        self, ledger: EngineLedger, samples: Sequence[Sample], fall: int, wave: int, *, times: int
    ) -> Judgement:
        before, low, high = before_fall(samples, fall), samples[fall], samples[wave]
        taken_in = prompt_tokens_until(samples[fall : wave + 1])[-1]
        took_s = apart_s(before, low)
        within = " from one line to the next" if took_s is None else f" within {duration(took_s)}"
        preemptions = counter_moved(before, low, "preemptions")
        finished = counter_moved(before, low, "finished")
        ended = isinstance(finished, int)
        return self.finding(
            ledger,
            verdict="likely" if ended else "cannot-tell",
            since_ns=low.at_ns or 0,
            position=low.position,
            evidence=(
                Evidence("usage_before", round(100 * (before.usage or 0), 1), "%", low.source, before.position),
                Evidence("usage_after", round(100 * (low.usage or 0), 1), "%", low.source, low.position),
                Evidence("running_before", before.running or 0, "requests", low.source, before.position),
                Evidence("running_after", low.running or 0, "requests", low.source, low.position),
                Evidence("next_wave_waiting", for_room(high), "requests", low.source, high.position),
                Evidence("next_wave_running", high.running or 0, "requests", low.source, high.position),
                Evidence("next_wave_prompt_tokens", round(taken_in), "tokens", low.source, high.position),
                Evidence("finished_during_drop", finished, "requests", low.source, low.position),
                Evidence("aborted_during_drop", counter_moved(before, low, "aborted"), "requests", low.source),
                Evidence("preemptions_during_drop", preemptions, "preemptions", low.source, low.position),
                Evidence("collapses_seen", times, "times", low.source),
            ),
            explanation=(
                f"Usage fell from {percent(before.usage or 0)} to {percent(low.usage or 0)}{within} while"
                f" {before.running} requests were running. Then {for_room(high)} waited with {high.running} running and"
                " were admitted a few at a time, and prompt tokens were counted again, so these were new requests."
                + (
                    f" {counted(int(finished), 'request')} completed meanwhile: similar requests that start together"
                    " end together."
                    if ended
                    else " Requests that complete together produce this pattern, and so do clients that time out"
                    " together and retry: a log does not show how requests ended."
                )
                + f" Seen {counted(times, 'time')}."
            ),
            case="" if ended else "From a log",
            numbers={SMALLER_BUDGET: smaller_budget(ledger)},
            missing=(
                ("" if ended else "how the requests ended (vllm:request_success_total by finished_reason); ")
                + "why each block was freed (finished or preempted): attach the event stream (monitor doctor"
                f" tcp://HOST:5757); {PREEMPTIONS_HIDDEN[low.source]}"
            ),
        )

    def _remembered(self, ledger: EngineLedger, settings: Settings) -> list[Sample]:
        """Return the samples with figures, as far back as a fall matters, or all of them where they have no times."""
        since = ledger.now_ns - (settings(self.remember_s) + settings(self.next_wave_s)) * 1e9
        found: list[Sample] = []
        for sample in reversed(ledger.samples):
            if sample.at_ns and sample.at_ns < since:
                break
            if sample.usage is not None and sample.running is not None and sample.waiting is not None:
                found.append(sample)
        return found[::-1]

    def _wave_after(self, samples: Sequence[Sample], fall: int, settings: Settings) -> int | None:
        """If usage collapsed at line `fall`, the line after it at which most of a next wave stood waiting."""
        low = samples[fall]
        running, previous = low.running or 0, samples[fall - 1].running or 0
        before = before_fall(samples, fall)
        running_before = before.running or 0
        if (
            running_before < settings(self.min_requests)
            or (before.usage or 0) - (low.usage or 0) < settings(self.min_share)
            or running > running_before / 4
            or previous <= running_before / 4  # it had fallen before this line
            or generations_passed(before, low)
            or (apart_s(samples[fall - 1], low) or 0) > settings(self.max_interval_s)
        ):
            return None
        for index in range(fall, len(samples)):
            sample = samples[index]
            late = apart_s(low, sample)
            if (late if late is not None else index - fall) > settings(self.next_wave_s):
                return None
            waiting = for_room(sample)
            if waiting >= running_before / 2 and (sample.running or 0) < waiting:
                is_wave = is_new_work(samples, before, fall, index) and not self._ended_by_chance(
                    samples, before, fall, settings
                )
                return index if is_wave else None
        return None

    def _ended_by_chance(self, samples: Sequence[Sample], before: Sample, fall: int, settings: Settings) -> bool:
        """Whether requests with independent lengths would end so as often as the fewest and the widest that count."""
        chance = end_together_by_chance(samples[: fall + 1], before)
        return chance is not None and chance > self._least_chance(settings)


class LockstepFromReport(Lockstep):
    """A fall of usage that a report names, beside the pool's size and the load's command.

    Sees: usage before and after, what the pool holds, and what each request of the load needs.
    Cannot tell: whether requests completed or were preempted.
    Not when: the fall is less than half of the pool.
    """

    requires = ("report",)

    def applies(self, known: Known) -> bool:
        """Whether a report is all there is."""
        return known.lines and not known.stream and not known.samples

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the fall that the report names, beside what the load needs."""
        facts = ledger.facts
        if "usage_fell_from" not in facts:
            return
        high, low = number_fact(facts, "usage_fell_from") or 0.0, number_fact(facts, "usage_fell_to") or 0.0
        asked, capacity, each = demands(facts), capacity_tokens(facts), tokens_per_request(facts)
        if not asked or capacity is None or each is None or high - low < settings(self.min_share):
            return
        position = facts["usage_fell_from"].position
        yield self.finding(
            ledger,
            verdict="cannot-tell",
            position=position,
            evidence=(
                Evidence("usage_reported_before", round(100 * high, 1), "%", "report", position),
                Evidence("usage_reported_after", round(100 * low, 1), "%", "report", position),
                Evidence("pool_capacity", capacity, "tokens", "report", capacity_at(facts)),
                Evidence("tokens_per_request", each, "tokens", "report", facts["load_input_len"].position),
                *(Evidence(f"demand_of_{demand.clients}", demand.tokens, "tokens", "report") for demand in asked),
                *(
                    Evidence(f"demand_of_{demand.clients}_share", round(100 * demand.share, 1), "%", "report")
                    for demand in asked
                ),
                *_reported_number(ledger, "usage_peak_told", "usage_peak_reported", 100, "%"),
                *_reported_number(ledger, "preemptions_told", "preemptions_reported", 1, "preemptions"),
            ),
            explanation=(
                f"The report says that usage fell from {percent(high)} to {percent(low)}. The pool holds {capacity:,}"
                f" tokens, and each request {each:,} at its end: {_demands_text(asked)}."
                f" {_conclusion(asked)}{steps_text(asked[0], facts)} Nothing here shows whether requests completed or"
                " were preempted, so this is a hypothesis."
            ),
            case="From a report",
            missing=(
                "why the blocks were freed, finished or preempted: the event stream (monitor doctor tcp://HOST:5757)"
                " has the cause for each; or usage, Running and Waiting each second around the fall, with"
                " vllm:num_preemptions_total before and some minutes after it, since that counter lags"
            ),
        )


def _demands_text(asked: Sequence[Demand]) -> str:
    return " and ".join(f"{d.clients} hold {d.tokens:,}, {percent(d.share)} of it" for d in asked)


def _conclusion(asked: Sequence[Demand]) -> str:
    if min(demand.share for demand in asked) > 1:
        return (
            "That exceeds the pool, so preemption explains the fall as well as similar requests that start and end"
            " together do."
        )
    fits = [str(demand.clients) for demand in asked if demand.share <= 1]
    return (
        f"With {' or '.join(fits)} the pool is never full, so the engine has no need to preempt. Similar requests that"
        " start together also end together, and the next wave queues during its prefill."
    )


def _reported_number(ledger: EngineLedger, fact: str, name: str, times: int, unit: str) -> Iterator[Evidence]:
    if (figure := number_fact(ledger.facts, fact)) is not None:
        yield Evidence(name, round(times * figure, 1), unit, "report", ledger.facts[fact].position)
