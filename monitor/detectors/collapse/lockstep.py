"""collapse.lockstep: usage falls from full to nothing as alike requests end together, and the next wave queues.

From the stream, by the ends of requests and the queue after them (confirmed within two steps, or if they ran for
equally many, and else likely). From metrics, by usage, Running, Waiting and the count of finished requests at
scrapes up to 20 s apart (likely). From a log, which lacks that count (cannot-tell). From a bug report, by a fall of
usage, the pool's size and the load's command: a hypothesis, never above cannot-tell.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final

from kvscope.monitor.analysis.demand import (
    Demand,
    capacity_at,
    capacity_tokens,
    demands,
    number_fact,
    steps_text,
    tokens_per_request,
)
from kvscope.monitor.detectors.advice import smaller_budget
from kvscope.monitor.detectors.arrival_rates import for_room
from kvscope.monitor.detectors.collapse.ends_together import ended_since_pause
from kvscope.monitor.detectors.collapse.usage_fall import (
    before_fall,
    chance_within,
    counter_moved,
    end_together_by_chance,
    generations_passed,
    is_new_work,
)
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.engine_pace import at_pace_s, mean_step_s
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import LOST_EVENTS
from kvscope.monitor.detectors.sample_math import apart_s, prompt_tokens_until
from kvscope.monitor.detectors.sample_needs import SampleNeed
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.events.kinds import Cause
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted, duration, percent

LOCKSTEP_DO_NOW = ("Do not restart. Every one of these requests completed, and nothing is lost.",)
CHECK_TIMEOUTS: Final = (
    "Compare the time with the clients' time-outs. If the clients gave up and retried, raise the time-out or lower"
    " the load. If each got an answer, nothing is lost.",
)
LOCKSTEP_WONT_HELP = (
    "More KV memory, or fewer concurrent requests: the same happens at any usage.",
    "Looking for preemptions: there were none.",
)
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


class Lockstep(Detector[Judgement]):
    """Requests in lock-step that finish together."""

    code = "collapse.lockstep"
    severity = "warning"
    title = "Requests in lockstep finish together and the next wave queues"
    requires = ("stream", "metrics", "log", "report")
    position = 400

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

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the collapse, from the best evidence there is."""
        if ledger.has_stream:
            yield from self._from_stream(ledger, settings)
        elif ledger.samples:
            yield from self._from_samples(ledger, settings)
        elif "usage_fell_from" in ledger.facts:
            yield from self._from_report(ledger, settings)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
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
        """Whether all ended within two steps, or ran for equally many, to one: then the prompts of a wave took several
        steps, and its ends as many.
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
        return Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if missing else "confirmed",
            since_ns=ledger.wall(first),
            position=ledger.at(burst[0].since_at),
            requests=tuple(record.id for record in burst),
            evidence=(
                Evidence("requests_finished_together", len(burst), "requests", position=ended_at),
                Evidence("within_s", round(spread, 3), "s", position=ended_at),
                Evidence("blocks_freed_by_finishing", freed, "blocks", position=ended_at),
                Evidence("preemptions", after.preemptions - before.preemptions, "preemptions", position=after_at),
                Evidence("usage_before", round(100 * _blocks_in_use(before) / usable, 1), "%", position=before_at),
                Evidence("usage_after", round(100 * _blocks_in_use(after) / usable, 1), "%", position=after_at),
                Evidence("next_wave_waiting", _queued_for_room(wave), "requests", position=wave_at),
                Evidence("next_wave_running", wave.running, "requests", position=wave_at),
                Evidence("collapses_seen", len(bursts), "times", position=ledger.at(*(r.since_at for r in bursts[-1]))),
            ),
            explanation=(
                f"At {clock_time(ledger.wall(first))}, {counted(len(burst), 'request')} finished within"
                f" {duration(spread)} of each other, by reaching their end and not by preemption, and freed"
                f" {counted(freed, 'block')}: usage fell from {percent(_blocks_in_use(before) / usable)} to"
                f" {percent(_blocks_in_use(after) / usable)}. The next wave then waited in the queue"
                f" ({_queued_for_room(wave)} waiting, {wave.running} running), its prompts computed one after the"
                " other. Similar requests that start together stay in lockstep."
            ),
            do_now=LOCKSTEP_DO_NOW,
            change=_lockstep_change(ledger),
            wont_help=LOCKSTEP_WONT_HELP,
            missing=missing,
        )

    def _from_samples(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        samples = [
            s
            for s in self._remembered(ledger, settings)
            if s.usage is not None and s.running is not None and s.waiting is not None
        ]
        found = [
            (fall, wave)
            for fall in range(1, len(samples))
            if (wave := self._wave_after(samples, fall, settings)) is not None
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
        return Judgement(
            code=self.code,
            engine=ledger.engine,
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
            do_now=LOCKSTEP_DO_NOW if ended else CHECK_TIMEOUTS,
            change=_lockstep_change(ledger),
            wont_help=LOCKSTEP_WONT_HELP if ended else LOCKSTEP_WONT_HELP[:1],
            missing=(
                ("" if ended else "how the requests ended (vllm:request_success_total by finished_reason); ")
                + "why each block was freed (finished or preempted): attach the event stream (monitor doctor"
                f" tcp://HOST:5757); {PREEMPTIONS_HIDDEN[low.source]}"
            ),
        )

    def _remembered(self, ledger: EngineLedger, settings: Settings) -> list[Sample]:
        """Return the recent samples, as far back as a fall matters, or all of them where they have no times."""
        since = ledger.now_ns - (settings(self.remember_s) + settings(self.next_wave_s)) * 1e9
        found: list[Sample] = []
        for sample in reversed(ledger.samples):
            if sample.at_ns and sample.at_ns < since:
                break
            found.append(sample)
        return found[::-1]

    def _wave_after(self, samples: Sequence[Sample], fall: int, settings: Settings) -> int | None:
        """If usage collapsed at line `fall`, the line after it at which most of a next wave stood waiting."""
        low = samples[fall]
        running, previous = low.running or 0, samples[fall - 1].running or 0
        if previous <= running:
            return None
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

    def _from_report(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        facts = ledger.facts
        high, low = number_fact(facts, "usage_fell_from") or 0.0, number_fact(facts, "usage_fell_to") or 0.0
        asked, capacity, each = demands(facts), capacity_tokens(facts), tokens_per_request(facts)
        if not asked or capacity is None or each is None or high - low < settings(self.min_share):
            return
        position = facts["usage_fell_from"].position
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="cannot-tell",
            position=position,
            evidence=(
                Evidence("usage_reported_before", round(100 * high, 1), "%", REPORT, position),
                Evidence("usage_reported_after", round(100 * low, 1), "%", REPORT, position),
                Evidence("pool_capacity", capacity, "tokens", REPORT, capacity_at(facts)),
                Evidence("tokens_per_request", each, "tokens", REPORT, facts["load_input_len"].position),
                *(Evidence(f"demand_of_{demand.clients}", demand.tokens, "tokens", REPORT) for demand in asked),
                *(
                    Evidence(f"demand_of_{demand.clients}_share", round(100 * demand.share, 1), "%", REPORT)
                    for demand in asked
                ),
                *_reported_number(ledger, "usage_peak_told", "usage_peak_reported", 100, "%"),
                *_reported_number(ledger, "preemptions_told", "preemptions_reported", 1, "preemptions"),
            ),
            explanation=(
                f"The report says that usage fell from {percent(high)} to {percent(low)}. The pool holds"
                f" {capacity:,} tokens, and each request {each:,} at its end: {_demands_text(asked)}."
                f" {_conclusion(asked)}{steps_text(asked[0], facts)} Nothing here shows whether requests completed"
                " or were preempted, so this is a hypothesis."
            ),
            do_now=(
                "Run it once more with VLLM_LOG_STATS_INTERVAL=1 and give this command the engine's log, or its"
                " /metrics page while it runs: a fall after which Waiting climbs while prompt tokens still count is"
                " lockstep.",
            ),
            change=(
                "If it is: lower --max-num-batched-tokens (to 8192, say), so that the first requests of a wave decode"
                " while the others are still prefilled, and vary lengths or arrival times in the load generator.",
            ),
            wont_help=("More KV memory or fewer clients, if it is lockstep: the same happens at any usage.",),
            missing=(
                "why the blocks were freed, finished or preempted: the event stream (monitor doctor"
                " tcp://HOST:5757) has the cause for each; or usage, Running and Waiting each second around the"
                " fall, with vllm:num_preemptions_total before and some minutes after it, since that counter lags"
            ),
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


def _lockstep_change(ledger: EngineLedger) -> tuple[str, ...]:
    return (
        f"Lower {smaller_budget(ledger)}, so that the first requests of a wave decode while the others are still"
        " prefilled, and the wave spreads out.",
        "Vary output lengths or arrival times in the load generator. Real traffic does not arrive in lockstep.",
    )


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
        f"With {' or '.join(fits)} the pool is never full, so the engine has no need to preempt. Similar requests"
        " that start together also end together, and the next wave queues during its prefill."
    )


def _reported_number(ledger: EngineLedger, fact: str, name: str, times: int, unit: str) -> Iterator[Evidence]:
    if (figure := number_fact(ledger.facts, fact)) is not None:
        yield Evidence(name, round(times * figure, 1), unit, REPORT, ledger.facts[fact].position)


REPORT: Final = "report"
