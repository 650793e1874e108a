"""Leaks from figures alone: usage, Running and prompt throughput over time. Never more than likely.

leak.finished-held   usage follows the prompts taken in, or stays up with nothing running
leak.rising-floor    it stays up with nothing running, and a little higher after each drain
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.leak.connector import FINISHED_HELD
from kvscope.monitor.detectors.leak.unaccounted import RISING_FLOOR
from kvscope.monitor.detectors.sample_math import DEFAULT_INTERVAL_S, prompt_tokens_until, spaced
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.idle_floors import Floors
from kvscope.monitor.text import clock_time, counted, percent


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What an engine's usage tells of its leaks."""
    yield from list(_finished_held(ledger, settings)) or _not_freed_at_reset(ledger)


class _Series(NamedTuple):
    """Samples that have the figures this needs, and the prompt tokens taken in until each."""

    samples: Sequence[Sample]
    usage: list[float]
    running: list[float]
    prompt_tokens: list[float]


_DO_NOW_BY_FIGURES = (
    "Only a restart gives the blocks back: drain this engine before the pool is full, then restart it.",
    "Look for a KV connector or disaggregated serving in its command: a transfer whose completion never arrives keeps a"
    " finished request's blocks.",
)
_CHANGE_BY_FIGURES = (
    "Give the connector a lease (vLLM with NIXL: VLLM_NIXL_ABORT_REQUEST_TIMEOUT, or a release since PR #41383, whose"
    " leases are renewed), or run without it if requests need not be handed on (drop --kv-transfer-config).",
)
_MISSING_BY_FIGURES = (
    "which request owns each block, and whether its free was deferred: attach the event stream (monitor doctor"
    " tcp://HOST:5757). That also tells this from leak.unaccounted."
)


def _finished_held(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    samples = [s for s in ledger.samples if s.usage is not None and s.running is not None]
    if len(samples) < 2:
        return
    # After a drain to nothing running, usage says what no live request holds.
    floor = _idle_floor(samples, settings)
    series = _series(samples) if _may_ratchet(samples, settings) else None
    fit = _ratchet(series, settings) if series is not None else None
    if floor is None and fit is None:
        return
    if fit is None and (rising := _rising_floor(ledger, settings, samples)):
        yield rising
        return
    evidence = _ratchet_evidence(series) if series is not None else []
    first, last = samples[0], samples[-1]
    signs = []
    pending = fit is None
    if floor is not None:
        start = samples[floor]
        pending = pending and _lasted_s(ledger, samples, floor) < settings(FINISHED_HELD, "grace_s")
        evidence.append(
            Evidence("usage_with_nothing_running", round(100 * _usage(last), 1), "%", start.source, start.position)
        )
        waiting = f" and {start.waiting} waiting" if start.waiting else ""
        signs.append(f"usage stays at {percent(_usage(last))} with nothing running{waiting}")
    if fit is not None:
        signs.append(
            f"usage follows the running sum of prompt tokens (R² {fit.r_squared:.3f}, {100 * fit.slope:.2f} % of the"
            f" pool for each thousand), not the number of running requests (correlation {fit.correlation:.2f})"
        )
    course = ""
    if len({(sample.usage, sample.running) for sample in samples}) > 1:
        course = (
            f" From {percent(_usage(first))} with {first.running} running at first to {percent(_usage(last))} with"
            f" {last.running} at last."
        )
    since_sample = samples[floor if floor is not None else 0]
    yield Judgement(
        code=FINISHED_HELD,
        engine=ledger.engine,
        verdict="likely",
        pending=pending,
        since_ns=since_sample.at_ns or 0,
        position=since_sample.position,
        evidence=tuple(evidence),
        explanation=(
            f"Requests leave and their blocks stay: {' and '.join(signs)}.{course}"
            " This excludes high load (usage would fall with Running), one long request and growth by decoding (usage"
            " would not follow arrivals), and a warm prefix cache (vLLM counts cached blocks nobody uses as free)."
        ),
        do_now=_DO_NOW_BY_FIGURES,
        change=_CHANGE_BY_FIGURES,
        wont_help=(
            "Lowering max_num_seqs, or adding capacity: the running requests are not what fills the pool.",
            "A larger gpu_memory_utilization: it only takes longer to fill.",
        ),
        missing=_MISSING_BY_FIGURES,
    )


def _rising_floor(ledger: EngineLedger, settings: Settings, samples: Sequence[Sample]) -> Judgement | None:
    """What the floors say: the same sign, but little by little, where finished-held loses whole requests."""
    floors = Floors()
    for index, sample in enumerate(samples):
        idle = not (sample.running or sample.waiting or sample.deferred)
        floors.look(index, idle=idle, worked=bool(sample.generation_tokens_per_s), in_use=_usage(sample))
    rising = floors.rising()
    rises = len(rising) - 1
    if rises < settings(RISING_FLOOR, "min_rises"):
        return None
    first, last = samples[rising[0].at], samples[rising[-1].at]
    low, high = rising[0].in_use, rising[-1].in_use
    each = (high - low) / rises
    span = f"{first.position} to {last.position}"
    return Judgement(
        code=RISING_FLOOR,
        engine=ledger.engine,
        verdict="likely",
        since_ns=first.at_ns or 0,
        position=first.position,
        evidence=(
            Evidence("times_the_floor_rose", rises, "drains to idle", last.source, span),
            Evidence("first_floor", round(100 * low, 1), "%", first.source, first.position),
            Evidence("last_floor", round(100 * high, 1), "%", last.source, last.position),
            Evidence("each_time", round(100 * each, 2), "% of the pool", last.source),
        ),
        explanation=(
            f"Each time nothing is running, more of the pool stays in use than the time before: {percent(low)}"
            f" at first, {percent(high)} after {rises} more such drains. A warm prefix cache makes no such"
            " floor (vLLM counts cached blocks that nobody uses as free), and no live request is there to hold it."
            f" At this rate the pool is full after {(1 - high) / each:,.0f} drains more."
        ),
        do_now=("There is time: plan a restart of this engine for a quiet hour. Only that gives the blocks back.",),
        change=(
            "Find which requests leave them: the event stream names them. It is a defect of the engine: report it, and"
            " upgrade to a release that has it fixed.",
        ),
        wont_help=(
            "Lowering max_num_seqs, or adding capacity: the running requests are not what stays.",
            "A larger gpu_memory_utilization: it only takes longer to fill.",
        ),
        missing=_MISSING_BY_FIGURES,
    )


def _usage(sample: Sample) -> float:
    return sample.usage or 0.0


def _not_freed_at_reset(ledger: EngineLedger) -> Iterator[Judgement]:
    """An engine that may not reset its prefix cache because blocks are in use says how many; idle, it has none.

    One that is idle stops logging: the line before the warning tells, and the one that comes soon after it.
    """
    warning = ledger.facts.get("blocks_not_freed")
    if warning is None or warning.at_ns is None or not isinstance(warning.value, int) or not warning.value:
        return
    at_ns = warning.at_ns
    before = [s for s in ledger.samples if s.at_ns is not None and s.at_ns <= at_ns]
    after = [s for s in ledger.samples if s.at_ns is not None and at_ns < s.at_ns <= at_ns + DEFAULT_INTERVAL_S * 1e9]
    if not before or any(sample.running or sample.waiting for sample in (before[-1], *after[:1])):
        return
    if before[-1].running is None or before[-1].waiting is None:
        return
    yield Judgement(
        code=FINISHED_HELD,
        engine=ledger.engine,
        verdict="likely",
        since_ns=at_ns,
        position=warning.position,
        evidence=(
            Evidence("blocks_not_freed", warning.value, "blocks", "log", warning.position),
            Evidence("running", 0, "requests", "log", before[-1].position),
            Evidence("waiting", 0, "requests", "log", before[-1].position),
        ),
        explanation=(
            f"A reset of the prefix cache failed at {clock_time(at_ns)} because {counted(warning.value, 'block')} were"
            " not freed yet, and nothing was running or waiting: no live request holds them."
        ),
        do_now=_DO_NOW_BY_FIGURES,
        change=_CHANGE_BY_FIGURES,
        wont_help=("Resetting again: it is refused for as long as the blocks are held.",),
        missing=_MISSING_BY_FIGURES,
    )


def _series(samples: Sequence[Sample]) -> _Series:
    taken_in = prompt_tokens_until(samples)
    kept = sorted({*spaced(samples), len(samples) - 1})
    return _Series(
        [samples[n] for n in kept],
        [_usage(samples[n]) for n in kept],
        [float(samples[n].running or 0) for n in kept],
        [taken_in[n] for n in kept],
    )


class _Fit(NamedTuple):
    slope: float
    """Share of the pool for each thousand prompt tokens taken in."""
    r_squared: float
    correlation: float


def _fit(series: _Series) -> _Fit | None:
    thousands = [tokens / 1000 for tokens in series.prompt_tokens]
    if len(thousands) < 3 or len(set(thousands)) < 2 or len(set(series.usage)) < 2:
        return None
    slope, _ = statistics.linear_regression(thousands, series.usage)
    r_squared = statistics.correlation(thousands, series.usage) ** 2
    correlation = statistics.correlation(series.running, series.usage) if len(set(series.running)) > 1 else 0.0
    return _Fit(slope, r_squared, correlation)


def _may_ratchet(samples: Sequence[Sample], settings: Settings) -> bool:
    """Whether usage has climbed and never come back: what is quickly seen not to be so of most engines."""
    if _usage(samples[-1]) - _usage(samples[0]) < settings(FINISHED_HELD, "min_rise"):
        return False
    highest, most = 0.0, settings(FINISHED_HELD, "max_fall")
    for sample in samples:
        usage = sample.usage or 0.0
        if highest - usage > most:
            return False
        highest = max(highest, usage)
    return True


def _ratchet(series: _Series, settings: Settings) -> _Fit | None:
    """Usage that climbs with what was ever taken in, and not with what is running."""
    fit = _fit(series)
    usage, running = series.usage, series.running
    if fit is None or len(usage) < settings(FINISHED_HELD, "min_samples"):
        return None
    load_went = running[-1] <= max(running) / 2
    if (
        fit.slope > 0
        and fit.r_squared >= settings(FINISHED_HELD, "min_fit")
        and fit.correlation <= settings(FINISHED_HELD, "max_correlation")
        and (load_went or len(usage) >= settings(FINISHED_HELD, "steady_samples"))
    ):
        return fit
    return None


def _idle_floor(samples: Sequence[Sample], settings: Settings) -> int | None:
    """Where the last stretch with nothing running, yet blocks in use, begins, if the samples end in one."""
    start = len(samples)
    while start > 0 and not samples[start - 1].running and not samples[start - 1].deferred:
        start -= 1
        if samples[start].generation_tokens_per_s:
            break  # something had run since the sample before
    floor = min((_usage(sample) for sample in samples[start:]), default=0.0)
    return start if floor >= settings(FINISHED_HELD, "idle_floor") else None


def _lasted_s(ledger: EngineLedger, samples: Sequence[Sample], start: int) -> float:
    """How long the stretch is. vLLM falls silent when nothing moves, so it lasts until the log's own end."""
    began = samples[start].at_ns
    return (ledger.now_ns - began) / 1e9 if began else (len(samples) - 1 - start) * DEFAULT_INTERVAL_S


def _ratchet_evidence(series: _Series) -> list[Evidence]:
    first, last = series.samples[0].position, series.samples[-1].position
    span, source = f"{first} to {last}", series.samples[-1].source
    evidence = []
    fit = _fit(series)
    if fit is not None:
        evidence += [
            Evidence("pinned_share_per_1000_prompt_tokens", round(100 * fit.slope, 3), "%", source, span),
            Evidence("r_squared", round(fit.r_squared, 4), "", source, span),
            Evidence("correlation_with_running", round(fit.correlation, 3), "", source, span),
        ]
    per_running = [100 * u / max(r, 1.0) for u, r in zip(series.usage, series.running, strict=True)]
    return [
        *evidence,
        Evidence("usage_per_running_first", round(per_running[0], 1), "%", source, first),
        Evidence("usage_per_running_last", round(per_running[-1], 1), "%", source, last),
    ]
