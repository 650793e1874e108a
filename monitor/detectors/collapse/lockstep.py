"""collapse.lockstep: usage falls from full to nothing as alike requests end together.

It needs the ends of requests and the queue after them (confirmed), or usage, Running and Waiting over
time (likely).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from kvscope.monitor.detectors.advice import smaller_budget
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sample_math import apart_s, prompt_tokens_until
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.state.records import RequestState
from kvscope.monitor.text import clock_time, counted, duration, percent

LOCKSTEP = "collapse.lockstep"
FALL_S = 2.0
"""What figures may take to show a fall that took within_s: gauges are those of the last step that ended."""

_DO_NOW = ("Nothing is broken and nothing is lost: every one of these requests was answered. Do not restart.",)
_WONT_HELP = (
    "More KV memory, or fewer requests at a time: the same happens at any usage.",
    "Looking for preemptions: there were none.",
)


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """The collapses of one engine."""
    if ledger.has_stream:
        yield from _lockstep(ledger, settings)
    elif ledger.samples:
        yield from _lockstep_by_figures(ledger, settings)


# -------------------------------------------------------------------- from the stream

# As plain numbers: comparing with an IntEnum's member costs several times as much, and all that ended are looked at.
_NATURAL_ENDS = frozenset((int(Status.FINISHED_STOPPED), int(Status.FINISHED_LENGTH_CAPPED)))


def _lockstep(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    bursts = _bursts(ledger, settings)
    for burst in reversed(bursts):
        wave = _next_wave(ledger, settings, burst)
        if wave is not None:
            yield _judged(ledger, burst, wave, bursts)
            return


def _bursts(ledger: EngineLedger, settings: Settings) -> list[list[RequestState]]:
    """Groups of requests that of late came to their natural end within a moment of each other and held much of the
    pool.
    """
    remember_s, fewest = settings(LOCKSTEP, "remember_s"), settings(LOCKSTEP, "min_requests")
    least = settings(LOCKSTEP, "min_share")
    within_ns = settings(LOCKSTEP, "within_s") * 1e9
    usable = max(1, ledger.state.total - ledger.state.reserved)
    ended = [record for record in ledger.ended if record.status in _NATURAL_ENDS]
    ended.sort(key=lambda record: record.finished_ns)
    bursts: list[list[RequestState]] = []
    for record in ended:
        if bursts and record.finished_ns - bursts[-1][0].finished_ns <= within_ns:
            bursts[-1].append(record)
        else:
            bursts.append([record])
    return [
        burst
        for burst in bursts
        if len(burst) >= fewest
        and (ledger.now_ns - _end_of(ledger, burst)) / 1e9 < remember_s
        and sum([record.peak_blocks for record in burst]) / usable >= least
        and _in_step(burst, settings)
        and _fell(ledger, burst, settings)
    ]


def _in_step(burst: Sequence[RequestState], settings: Settings) -> bool:
    """Whether they ended close together for the length of their lives: short ones end within a moment by chance."""
    spread = burst[-1].finished_ns - burst[0].finished_ns
    life = statistics.median(record.finished_ns - (record.admitted_ns or record.arrived_ns) for record in burst)
    return spread <= settings(LOCKSTEP, "max_spread") * life


def _fell(ledger: EngineLedger, burst: Sequence[RequestState], settings: Settings) -> bool:
    """Whether most of what ran ended with the burst and the pool emptied, and by no preemption."""
    before, after = _around(ledger, burst)
    if before is None or after is None:
        return False
    fall = (_held(before) - _held(after)) / max(1, before.balance.total - before.balance.reserved)
    return (
        fall >= settings(LOCKSTEP, "min_share")
        and after.running <= before.running / 4
        and after.preemptions == before.preemptions
    )


def _around(ledger: EngineLedger, burst: Sequence[RequestState]) -> tuple[Point | None, Point | None]:
    """The recent past just before the burst, and the lowest held just after it."""
    first, last = ledger.wall(burst[0].finished_ns), _end_of(ledger, burst)
    before = None
    after = None
    for point in reversed(ledger.points):
        if point.at_ns < first:
            before = point
            break
        if last <= point.at_ns <= last + 2_000_000_000 and (after is None or _held(point) <= _held(after)):
            after = point
    return before, after


def _next_wave(ledger: EngineLedger, settings: Settings, burst: Sequence[RequestState]) -> Point | None:
    """The moment after the burst when most of a next wave stood waiting with little running, if there was one."""
    end = _end_of(ledger, burst)
    until = end + settings(LOCKSTEP, "next_wave_s") * 1e9
    for point in ledger.points:
        if end < point.at_ns <= until and point.waiting >= len(burst) / 2 and point.running < point.waiting:
            return point
    return None


def _judged(
    ledger: EngineLedger, burst: Sequence[RequestState], wave: Point, bursts: Sequence[Sequence[RequestState]]
) -> Judgement:
    before, after = _around(ledger, burst)
    assert before is not None
    assert after is not None
    before_at, after_at, wave_at = (str(point.position or "") for point in (before, after, wave))
    ended_at = ledger.at(*(record.since_at for record in burst))
    usable = before.balance.total - before.balance.reserved
    first, last = burst[0].finished_ns, burst[-1].finished_ns
    spread = (last - first) / 1e9
    freed = sum(record.peak_blocks for record in burst)
    return Judgement(
        code=LOCKSTEP,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        since_ns=ledger.wall(first),
        position=ledger.at(burst[0].since_at),
        requests=tuple(record.id for record in burst),
        evidence=(
            Evidence("requests_finished_together", len(burst), "requests", position=ended_at),
            Evidence("within_s", round(spread, 3), "s", position=ended_at),
            Evidence("blocks_freed_by_finishing", freed, "blocks", position=ended_at),
            Evidence("preemptions", after.preemptions - before.preemptions, "preemptions", position=after_at),
            Evidence("usage_before", round(100 * _held(before) / usable, 1), "%", position=before_at),
            Evidence("usage_after", round(100 * _held(after) / usable, 1), "%", position=after_at),
            Evidence("waiting_in_next_wave", wave.waiting, "requests", position=wave_at),
            Evidence("running_in_next_wave", wave.running, "requests", position=wave_at),
            Evidence("collapses_seen", len(bursts), "times", position=ledger.at(*(r.since_at for r in bursts[-1]))),
        ),
        explanation=(
            f"At {clock_time(ledger.wall(first))}, {counted(len(burst), 'request')} finished within {duration(spread)}"
            f" of each other, by reaching their end and not by preemption, and freed {counted(freed, 'block')}: usage"
            f" fell from {percent(_held(before) / usable)} to {percent(_held(after) / usable)}. The next wave then"
            f" stood in the queue ({wave.waiting} waiting, {wave.running} running), its prompts computed one after"
            " the other. Alike requests that start together stay in step."
        ),
        do_now=_DO_NOW,
        change=_change(ledger),
        wont_help=_WONT_HELP,
    )


def _change(ledger: EngineLedger) -> tuple[str, ...]:
    return (
        f"Lower {smaller_budget(ledger)}, so that the first requests of a wave decode while the others are still"
        " prefilled, and the wave spreads out.",
        "Vary output lengths or arrival times in the load generator; real traffic does not come in step.",
    )


def _end_of(ledger: EngineLedger, burst: Sequence[RequestState]) -> int:
    return ledger.wall(burst[-1].finished_ns)


def _held(point: Point) -> int:
    balance = point.balance
    return balance.running + balance.waiting


# -------------------------------------------------------------------- from figures alone


def _lockstep_by_figures(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    samples = [
        s
        for s in _remembered(ledger, settings)
        if s.usage is not None and s.running is not None and s.waiting is not None
    ]
    found = [
        (fall, wave) for fall in range(1, len(samples)) if (wave := _wave_after(samples, fall, settings)) is not None
    ]
    if not found:
        return
    fall, wave = found[0]
    before, low, high = _before(samples, fall), samples[fall], samples[wave]
    taken_in = prompt_tokens_until(samples[fall : wave + 1])[-1]
    took_s = apart_s(before, low)
    within = " from one line to the next" if took_s is None else f" within {duration(took_s)}"
    preemptions = _counted(before, low, "preemptions")
    finished = _counted(before, low, "finished")
    yield Judgement(
        code=LOCKSTEP,
        engine=ledger.engine,
        verdict="likely",
        since_ns=low.at_ns or 0,
        position=low.position,
        evidence=(
            Evidence("usage_before", round(100 * (before.usage or 0), 1), "%", low.source, before.position),
            Evidence("usage_after", round(100 * (low.usage or 0), 1), "%", low.source, low.position),
            Evidence("running_before", before.running or 0, "requests", low.source, before.position),
            Evidence("running_after", low.running or 0, "requests", low.source, low.position),
            Evidence("waiting_in_next_wave", high.waiting or 0, "requests", low.source, high.position),
            Evidence("running_in_next_wave", high.running or 0, "requests", low.source, high.position),
            Evidence("prompt_tokens_of_next_wave", round(taken_in), "tokens", low.source, high.position),
            Evidence("finished_in_the_fall", finished, "requests", low.source, low.position),
            Evidence("preemptions_counted_in_the_fall", preemptions, "preemptions", low.source, low.position),
            Evidence("collapses_seen", len(found), "times", low.source),
        ),
        explanation=(
            f"Usage fell from {percent(before.usage or 0)} to {percent(low.usage or 0)}{within} while"
            f" {before.running} requests were running; then {high.waiting} stood waiting with {high.running} running,"
            " and were admitted a few at a time. New prompt tokens were counted as they were, so these were new"
            " requests: the old ones had finished together, as alike requests that started together do. Preempted"
            f" requests would have been computed again without being counted. Seen {counted(len(found), 'time')}."
        ),
        do_now=_DO_NOW,
        change=_change(ledger),
        wont_help=_WONT_HELP,
        missing=(
            "why each block was freed (finished or preempted): attach the event stream (monitor doctor tcp://HOST:5757);"
            f" {_PREEMPTIONS_HIDDEN[low.source]}"
        ),
    )


_PREEMPTIONS_HIDDEN = {
    "log": "vLLM's log cannot print preemptions",
    "metrics": "vLLM's own counter moves only with a preempted request's next token",
    "prometheus": "vLLM's own counter moves only with a preempted request's next token",
}


def _remembered(ledger: EngineLedger, settings: Settings) -> list[Sample]:
    """The samples of late, as far back as a fall is remembered; all of them, where they have no times."""
    since = ledger.now_ns - (settings(LOCKSTEP, "remember_s") + settings(LOCKSTEP, "next_wave_s")) * 1e9
    found: list[Sample] = []
    for sample in reversed(ledger.samples):
        if sample.at_ns and sample.at_ns < since:
            break
        found.append(sample)
    return found[::-1]


def _counted(before: Sample, low: Sample, counter: str) -> int | str:
    """How far a counter moved in the fall."""
    first, last = getattr(before, counter), getattr(low, counter)
    return "not exposed" if first is None or last is None else last - first


def _before(samples: Sequence[Sample], fall: int) -> Sample:
    """The fullest sample before a fall: one of two lines, or of as long as a fall may take if they are closer."""
    first = max(0, fall - 2)
    while first > 0 and (apart_s(samples[first - 1], samples[fall]) or FALL_S) < FALL_S:
        first -= 1
    return max(samples[first:fall], key=lambda sample: sample.usage or 0)


def _wave_after(samples: Sequence[Sample], fall: int, settings: Settings) -> int | None:
    """If usage collapsed at line `fall`, the line after it at which most of a next wave stood waiting."""
    before, low = _before(samples, fall), samples[fall]
    running_before, running = before.running or 0, low.running or 0
    previous = samples[fall - 1].running or 0
    if (
        running_before < settings(LOCKSTEP, "min_requests")
        or (before.usage or 0) - (low.usage or 0) < settings(LOCKSTEP, "min_share")
        or running > running_before / 4
        or previous <= running_before / 4  # it had fallen before this line
    ):
        return None
    for index in range(fall, len(samples)):
        sample = samples[index]
        late = apart_s(low, sample)
        if (late if late is not None else index - fall) > settings(LOCKSTEP, "next_wave_s"):
            return None
        waiting = sample.waiting or 0
        if waiting >= running_before / 2 and (sample.running or 0) < waiting:
            return index if _is_new_work(samples, before, fall, index) else None
    return None


def _is_new_work(samples: Sequence[Sample], before: Sample, fall: int, wave: int) -> bool:
    """Whether the wave is of new requests: the old ones are counted as finished; or, where that is not said, prompt
    tokens are counted while the wave runs up, which a preempted request's are not again.
    """
    finished = _counted(before, samples[fall], "finished")
    if isinstance(finished, int):
        return finished >= (before.running or 0) / 2
    return prompt_tokens_until(samples[fall : wave + 6])[-1] > 0
