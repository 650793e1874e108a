"""Usage that falls from full to nothing.

collapse.lockstep needs the ends of requests and the queue after them (confirmed), or usage, Running and Waiting over
time (likely).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from monitor.detectors.figures import prompt_tokens_until
from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.events.kinds import Status
from monitor.events.records import RequestState
from monitor.events.sample import Sample
from monitor.ledger.ledger import EngineLedger, Point
from monitor.ledger.words import clock_time, counted, duration, percent

LOCKSTEP = "collapse.lockstep"

_DO_NOW = ("Nothing is broken and nothing is lost: every one of these requests was answered. Do not restart.",)
_CHANGE = (
    "Lower --max-num-batched-tokens (to 8192, say), so that the first requests of a wave decode while the others are"
    " still prefilled, and the wave spreads out.",
    "Vary output lengths or arrival times in the load generator; real traffic does not come in step.",
)
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


def _lockstep(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    bursts = [
        burst
        for burst in _bursts(ledger, settings)
        if (ledger.now_ns - _end_of(ledger, burst)) / 1e9 < settings(LOCKSTEP, "remember_s")
    ]
    for burst in reversed(bursts):
        wave = _next_wave(ledger, settings, burst)
        if wave is not None:
            yield _judged(ledger, burst, wave, len(bursts))
            return


def _bursts(ledger: EngineLedger, settings: Settings) -> list[list[RequestState]]:
    """Groups of requests that came to their natural end within a moment of each other and held much of the pool."""
    within_ns = settings(LOCKSTEP, "within_s") * 1e9
    usable = max(1, ledger.state.total - ledger.state.reserved)
    ended = [r for r in ledger.ended if r.status in (Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED)]
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
        if len(burst) >= settings(LOCKSTEP, "min_requests")
        and _in_step(burst, settings)
        and sum(r.peak_blocks for r in burst) / usable >= settings(LOCKSTEP, "min_share")
        and _fell(ledger, burst, settings)
    ]


def _in_step(burst: Sequence[RequestState], settings: Settings) -> bool:
    """Whether they ended close together for the length of their lives: short ones end within a moment by chance."""
    spread = burst[-1].finished_ns - burst[0].finished_ns
    life = statistics.median(record.finished_ns - record.arrived_ns for record in burst)
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


def _judged(ledger: EngineLedger, burst: Sequence[RequestState], wave: Point, times: int) -> Judgement:
    before, after = _around(ledger, burst)
    assert before is not None
    assert after is not None
    usable = before.balance.total - before.balance.reserved
    first, last = burst[0].finished_ns, burst[-1].finished_ns
    spread = (last - first) / 1e9
    freed = sum(record.peak_blocks for record in burst)
    return Judgement(
        code=LOCKSTEP,
        engine=ledger.engine,
        verdict="likely" if ledger.state.damaged else "confirmed",
        since_ns=ledger.wall(first),
        position=str(ledger.position()),
        requests=tuple(record.id for record in burst),
        evidence=(
            Evidence("requests_finished_together", len(burst), "requests"),
            Evidence("within_s", round(spread, 3), "s"),
            Evidence("blocks_freed_by_finishing", freed, "blocks"),
            Evidence("preemptions", after.preemptions - before.preemptions, "preemptions"),
            Evidence("usage_before", round(100 * _held(before) / usable, 1), "%"),
            Evidence("usage_after", round(100 * _held(after) / usable, 1), "%"),
            Evidence("waiting_in_next_wave", wave.waiting, "requests"),
            Evidence("running_in_next_wave", wave.running, "requests"),
            Evidence("collapses_seen", times, "times"),
        ),
        explanation=(
            f"At {clock_time(ledger.wall(first))} {counted(len(burst), 'request')} finished within {duration(spread)}"
            f" of each other, by reaching their end and not by preemption, and freed {counted(freed, 'block')}: usage"
            f" fell from {percent(_held(before) / usable)} to {percent(_held(after) / usable)}. The next wave then"
            f" stood in the queue ({wave.waiting} waiting, {wave.running} running), its prompts computed one after"
            " the other. Alike requests that start together stay in step."
        ),
        do_now=_DO_NOW,
        change=_CHANGE,
        wont_help=_WONT_HELP,
    )


def _end_of(ledger: EngineLedger, burst: Sequence[RequestState]) -> int:
    return ledger.wall(burst[-1].finished_ns)


def _held(point: Point) -> int:
    balance = point.balance
    return balance.running + balance.waiting


# -------------------------------------------------------------------- from figures alone


def _lockstep_by_figures(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    samples = [s for s in ledger.samples if s.usage is not None and s.running is not None and s.waiting is not None]
    found = [
        (fall, wave) for fall in range(1, len(samples)) if (wave := _wave_after(samples, fall, settings)) is not None
    ]
    if not found:
        return
    fall, wave = found[0]
    before, low, high = _before(samples, fall), samples[fall], samples[wave]
    taken_in = prompt_tokens_until(samples[fall : wave + 1])[-1]
    yield Judgement(
        code=LOCKSTEP,
        engine=ledger.engine,
        verdict="likely",
        since_ns=low.at_ns or 0,
        position=low.position,
        evidence=(
            Evidence("usage_before", round(100 * (before.usage or 0), 1), "%", "log", before.position),
            Evidence("usage_after", round(100 * (low.usage or 0), 1), "%", "log", low.position),
            Evidence("running_before", before.running or 0, "requests", "log", before.position),
            Evidence("running_after", low.running or 0, "requests", "log", low.position),
            Evidence("waiting_in_next_wave", high.waiting or 0, "requests", "log", high.position),
            Evidence("running_in_next_wave", high.running or 0, "requests", "log", high.position),
            Evidence("prompt_tokens_of_next_wave", round(taken_in), "tokens", "log", high.position),
            Evidence("collapses_seen", len(found), "times", "log"),
        ),
        explanation=(
            f"Usage fell from {percent(before.usage or 0)} to {percent(low.usage or 0)} between two lines while"
            f" {before.running} requests were running; then {high.waiting} stood waiting with {high.running} running,"
            " and were admitted a few at a time. New prompt tokens were counted as they were, so these were new"
            " requests: the old ones had finished together, as alike requests that started together do. Preempted"
            f" requests would have been computed again without being counted. Seen {counted(len(found), 'time')}."
        ),
        do_now=_DO_NOW,
        change=_CHANGE,
        wont_help=_WONT_HELP,
        missing=(
            "why each block was freed (finished or preempted): attach the event stream (monitor doctor tcp://HOST:5757);"
            " vLLM's log cannot print preemptions"
        ),
    )


def _before(samples: Sequence[Sample], fall: int) -> Sample:
    """The line before a fall, or the one before that if the fall took two lines."""
    candidates = samples[max(0, fall - 2) : fall]
    return max(candidates, key=lambda sample: sample.usage or 0)


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
    for index in range(fall, min(fall + 1 + round(settings(LOCKSTEP, "next_wave_s")), len(samples))):
        sample = samples[index]
        late = low.at_ns and sample.at_ns and (sample.at_ns - low.at_ns) / 1e9 > settings(LOCKSTEP, "next_wave_s")
        if late:
            return None
        waiting = sample.waiting or 0
        if waiting >= running_before / 2 and (sample.running or 0) < waiting:
            return index if _is_new_work(samples, fall, index) else None
    return None


def _is_new_work(samples: Sequence[Sample], fall: int, wave: int) -> bool:
    """Whether prompt tokens are counted while the wave runs up; a preempted request's are not counted again."""
    return prompt_tokens_until(samples[fall : wave + 6])[-1] > 0
