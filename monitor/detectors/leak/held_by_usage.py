"""leak.finished-held from metrics or a log: what usage does when requests leave.

Two series that both rise show nothing: long generations and
growing contexts raise usage as a leak does. These do:

    sign       usage stays up while                                         decides after
    ---------  -----------------------------------------------------------  ------------------------------------------
    starved    nothing runs and requests wait for room                      starved_s, three samples
    loading    the same, and some wait for something other than room: they  starved_s, three samples: cannot-tell
               may hold the pool for KV that is fetched
    idle       nothing runs or waits; blocks may wait for a KV connector    starved_s: cannot-tell, lease_s: likely;
                                                                            grace_s where no connector is configured
    drain      requests leave and usage does not fall, after each rise      min_samples, starved_s, one deep drain
               followed the prompts taken in
    overfull   more is in use than the live requests can hold at the        starved_s, three samples
               longest length that is allowed

Any interval up to a third of these times will do: a sample of a gauge is that of the last step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from ...base.text import clock_time, counted, duration, percent
from ...contract.samples import Sample
from ...ledger.demand import number_fact
from ...ledger.engine_ledger import EngineLedger
from ..detector import FromSamples, Settings, Threshold
from ..judgement import Evidence, HoldsBlocks, Verdict
from ..sample_math import DEFAULT_INTERVAL_S, FEWEST_SAMPLES
from .finished_held import FinishedHeld
from .lost_references import MIN_RISES
from .usage_series import (
    METRICS_MISSING,
    ConnectorKnowledge,
    connector_knowledge,
    fit_changes,
    fit_of,
    idle_usage_floors,
    lasted_s,
    ratchet_evidence,
    samples_with_usage,
    series_of,
    usage_of,
    window_s,
)

IDLE_MISSING: Final = (
    "whether a KV connector holds them: the engine's start-up log, or the event stream (monitor doctor tcp://HOST:5757)"
)
LOADING_MISSING: Final = (
    "which request holds each block, and since when each fetch waits: the event stream (monitor doctor"
    " tcp://HOST:5757); whether a connector fetches KV at all: the engine's start-up log with its --kv-transfer-config;"
    " and the metrics page of the side that sends"
)


class UsageSigns(NamedTuple):
    """The signs in the samples, and the sample that each begins at."""

    start: int
    verdict: Verdict
    text: str
    evidence: tuple[Evidence, ...]
    pending: bool = False
    from_drains: bool = False
    """Whether it rests on usage at idle alone, as leak.rising-floor does."""
    case: str = "From metrics or a log, at idle"
    missing: str = IDLE_MISSING


def usage_signs(
    ledger: EngineLedger, samples: Sequence[Sample], settings: Settings, grace: Threshold
) -> UsageSigns | None:
    """Return the strongest sign, None if there is none."""
    knowledge = connector_knowledge(ledger)
    found = (
        _starved(ledger, samples, settings, knowledge),
        _loading(ledger, samples, settings, knowledge),
        _drained(samples, settings, knowledge),
        _overfull(ledger, samples, settings, knowledge),
        _idle(ledger, samples, settings, grace, knowledge),
    )
    shown = [signs for signs in found if signs is not None]
    return min(shown, key=lambda signs: (signs.pending, signs.verdict != "likely"), default=None)


def _computed_nothing_since(samples: Sequence[Sample], holds: Callable[[Sample], bool]) -> int:
    """Return where the last window in which `holds` begins, or the number of samples if it does not hold at the end."""
    start = len(samples)
    while start > 0 and holds(samples[start - 1]):
        start -= 1
        if samples[start].generation_tokens_per_s or samples[start].prompt_tokens_per_s:
            break  # something had run since the sample before
    return start


def _starved(
    ledger: EngineLedger, samples: Sequence[Sample], settings: Settings, knowledge: ConnectorKnowledge
) -> UsageSigns | None:
    if knowledge == "consumer":
        return None  # its queue waits for KV from elsewhere, and holds blocks for it
    least = settings(FinishedHeld.idle_floor)

    def holds(sample: Sample) -> bool:
        return not sample.running and not sample.deferred and usage_of(sample) >= least

    start = _computed_nothing_since(samples, holds)
    window = samples[start:]
    for_room = [
        s for s in window if s.waiting and (s.deferred is not None or usage_of(s) >= settings(FinishedHeld.full_pool))
    ]
    if len(for_room) < 2 or usage_of(samples[-1]) < usage_of(samples[start]) - settings(FinishedHeld.max_fall):
        return None
    lasted, allowed = lasted_s(ledger, samples, start), settings(FinishedHeld.starved_s)
    waited, last = for_room[-1], samples[-1]
    return UsageSigns(
        start,
        "likely",
        f"For {duration(lasted)} nothing was running, {counted(waited.waiting or 0, 'request')} waited, and usage"
        f" stayed at {percent(usage_of(last))}. No running request holds these blocks, and the waiting requests have"
        " none to run with.",
        (
            Evidence("idle_usage", round(100 * usage_of(last), 1), "%", last.source, samples[start].position),
            Evidence("waiting", waited.waiting or 0, "requests", last.source, waited.position),
            Evidence("held_for", round(lasted, 1), "s", last.source, last.position),
        ),
        pending=lasted < allowed,
    )


def _loading(
    ledger: EngineLedger, samples: Sequence[Sample], settings: Settings, knowledge: ConnectorKnowledge
) -> UsageSigns | None:
    """Nothing runs or moves in a full pool, and requests that wait for KV from elsewhere may hold it."""

    def holds(sample: Sample) -> bool:
        is_full = usage_of(sample) >= settings(FinishedHeld.full_pool) and sample.awake is not False
        may_hold = bool(sample.deferred) or (bool(sample.waiting) and knowledge == "consumer")
        return not sample.running and may_hold and is_full

    start = _moved_last(samples, _computed_nothing_since(samples, holds))
    if start > len(samples) - 2:
        return None
    lasted, allowed = lasted_s(ledger, samples, start), settings(FinishedHeld.starved_s)
    last = samples[-1]
    waiting, deferred = last.waiting or 0, last.deferred
    of_which = (
        ""
        if deferred is None
        else f", of which {deferred:,} {'waits' if deferred == 1 else 'wait'} for something other than blocks"
    )
    return UsageSigns(
        start,
        "cannot-tell",
        f"For {duration(lasted)} nothing was running and nothing moved, {counted(waiting, 'request')} waited{of_which},"
        f" and usage stayed at {percent(usage_of(last))}. Either the waiting requests hold the pool for KV that a"
        " remote engine sends, and that engine is behind, died or lost them (stuck.remote-load). Or blocks of finished"
        " or aborted requests were never freed (a leak). Metrics show how much is held, but not which requests hold"
        " it.",
        (
            Evidence("idle_usage", round(100 * usage_of(last), 1), "%", last.source, samples[start].position),
            Evidence("waiting", waiting, "requests", last.source, last.position),
            Evidence(
                "deferred", "not exposed" if deferred is None else deferred, "requests", last.source, last.position
            ),
            Evidence("held_for", round(lasted, 1), "s", last.source, last.position),
            Evidence("connector", knowledge, "", last.source),
        ),
        pending=lasted < allowed or len(samples) - start < FEWEST_SAMPLES,
        case="From metrics or a log, while requests wait for KV",
        missing=LOADING_MISSING,
    )


def _moved_last(samples: Sequence[Sample], start: int) -> int:
    """Return the last sample from `start` on before which a step or a request ended, or fewer waited for KV."""
    for index in range(len(samples) - 1, start, -1):
        before, after = samples[index - 1], samples[index]
        fewer = (after.deferred or 0) < (before.deferred or 0)
        if fewer or after.steps != before.steps or after.finished != before.finished:
            return index
    return start


def _idle(
    ledger: EngineLedger, samples: Sequence[Sample], settings: Settings, grace: Threshold, knowledge: ConnectorKnowledge
) -> UsageSigns | None:
    least = settings(FinishedHeld.idle_floor)
    start = _computed_nothing_since(
        samples, lambda s: not s.running and not s.waiting and not s.deferred and usage_of(s) >= least
    )
    is_log = samples[-1].source == "log"  # vLLM logs nothing while it is idle
    if start > len(samples) - (1 if is_log else 2):
        return None
    lasted, last = lasted_s(ledger, samples, start), samples[-1]
    needed = settings(grace if knowledge == "none" else FinishedHeld.starved_s)
    sure_after = needed if knowledge == "none" else settings(FinishedHeld.lease_s)
    is_held = usage_of(last) >= usage_of(samples[start]) - settings(FinishedHeld.max_fall)
    if knowledge != "none" and not is_held:
        return None  # a consumer fetches them
    sure = lasted >= sure_after and is_held
    by = {
        "none": "The engine's logged arguments name no KV connector that could keep blocks on purpose.",
        "unknown": "It is unknown whether a KV connector keeps them for a consumer",
    }.get(knowledge, "A KV connector is configured and may keep them for a consumer")
    if knowledge != "none":
        by += f": such a hold may last {duration(settings(FinishedHeld.lease_s))}" + (
            ", and this has lasted longer." if sure else "."
        )
    return UsageSigns(
        start,
        "likely" if sure else "cannot-tell",
        f"For {duration(lasted)} nothing was running or waiting, and usage {'stayed at' if is_held else 'is still'}"
        f" {percent(usage_of(last))}. {by}",
        (
            Evidence("idle_usage", round(100 * usage_of(last), 1), "%", last.source, samples[start].position),
            Evidence("held_for", round(lasted, 1), "s", last.source, last.position),
            Evidence("connector", knowledge, "", last.source),
        ),
        pending=lasted < needed,
        from_drains=True,
    )


def _drained(samples: Sequence[Sample], settings: Settings, knowledge: ConnectorKnowledge) -> UsageSigns | None:
    """Return the sign that requests leave and usage does not fall, after it rose with the prompts that came."""
    if usage_of(samples[-1]) - usage_of(samples[0]) < settings(FinishedHeld.min_rise) or not _never_fell(
        samples, settings
    ):
        return None
    series = series_of(samples)
    most, left = max(series.running), series.running[-1]
    needed_s = settings(FinishedHeld.lease_s if knowledge == "producer" else FinishedHeld.starved_s)
    if (
        len(series.usage) <= settings(FinishedHeld.min_samples)
        or most - left < settings(FinishedHeld.min_left)
        or left > settings(FinishedHeld.max_running_left) * most
        or window_s(series.samples) < needed_s
    ):
        return None
    changes = fit_changes(series)
    if (
        changes is None
        or changes.correlation < settings(FinishedHeld.min_fit)
        or changes.constant_share > settings(FinishedHeld.max_constant)
    ):
        return None
    rise = series.usage[-1] - series.usage[0]
    of_those_left = sum(changes.largest_changes[: round(left)])
    if of_those_left > rise / 2:
        return None  # the few that are left may hold it all: each came in one interval
    return UsageSigns(
        0,
        "likely",
        f"Usage rose from {percent(series.usage[0])} to {percent(series.usage[-1])} as prompts arrived (correlation of"
        f" the changes {changes.correlation:.2f}) and did not fall when Running dropped from {most:.0f} to {left:.0f}."
        f" The {'remaining request' if round(left) == 1 else counted(round(left), 'remaining request')} can account for"
        f" at most {percent(max(of_those_left, 0.0))} of the pool. Long requests and growing contexts do not explain"
        " the rest: their blocks are freed as they end.",
        (
            Evidence("running_most", round(most), "requests", series.samples[0].source),
            Evidence("running_last", round(left), "requests", series.samples[0].source, series.samples[-1].position),
        ),
    )


def _never_fell(samples: Sequence[Sample], settings: Settings) -> bool:
    highest, most = 0.0, settings(FinishedHeld.max_fall)
    for sample in samples:
        if highest - usage_of(sample) > most:
            return False
        highest = max(highest, usage_of(sample))
    return True


def _overfull(
    ledger: EngineLedger, samples: Sequence[Sample], settings: Settings, knowledge: ConnectorKnowledge
) -> UsageSigns | None:
    """More is in use than the living requests can hold, each at the longest length that is allowed."""
    fit = number_fact(ledger.facts, "max_concurrency")
    if not fit or fit < 1:
        return None

    def holds(sample: Sample) -> bool:
        live = (sample.running or 0) + (sample.waiting or 0) + (sample.deferred or 0)
        return bool(sample.running) and (usage_of(sample) - settings(FinishedHeld.idle_floor)) * fit > live

    start = len(samples)
    while start > 0 and holds(samples[start - 1]):
        start -= 1
    if start > len(samples) - FEWEST_SAMPLES:
        return None
    lasted = window_s(samples, start)
    needed = settings(FinishedHeld.starved_s if knowledge in ("none", "unknown") else FinishedHeld.lease_s)
    if lasted < needed:
        return None
    last = samples[-1]
    live = (last.running or 0) + (last.waiting or 0)
    return UsageSigns(
        start,
        "likely",
        f"For {duration(lasted)}, usage has exceeded what the live requests can hold: the pool fits {fit:g} requests of"
        f" max_model_len, {live} are running or waiting, and usage is {percent(usage_of(last))}, as much as"
        f" {usage_of(last) * fit:.1f} such requests hold.",
        (
            Evidence("max_concurrency", fit, "requests", "log", ledger.facts["max_concurrency"].position),
            Evidence("live_requests", live, "requests", last.source, last.position),
            Evidence("usage", round(100 * usage_of(last), 1), "%", last.source, last.position),
        ),
    )


class FinishedHeldFromSamples(FromSamples, FinishedHeld):
    """Usage that stays up when requests have left.

    Sees: usage that remains with nothing running, after a drain, beyond what live requests can hold, or that a failed
    reset of the prefix cache reports at idle.
    Likely when: no request and no KV connector within its lease can hold these blocks.
    Cannot tell: a connector may still hold them, or requests that wait for KV from elsewhere do.
    Not when: growing contexts raise usage, or it grows a little with each drain (leak.rising-floor).
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[HoldsBlocks]:
        """Yield the signs in the samples. Those from idle usage alone count only where no floor has risen for long."""
        samples = samples_with_usage(ledger)
        signs = usage_signs(ledger, samples, settings, self.grace_s) if len(samples) > 1 else None
        if signs is None or (signs.from_drains and len(idle_usage_floors(ledger)) > settings(MIN_RISES)):
            yield from self._from_failed_reset(ledger)
        else:
            yield self._by_signs(ledger, samples, signs)

    def _from_failed_reset(self, ledger: EngineLedger) -> Iterator[HoldsBlocks]:
        """Yield a judgement from a failed reset of the prefix cache, which reports the blocks in use: an idle engine
        has none.

        An idle engine stops logging: the line before the warning shows it, and the one soon after it.
        """
        warning = ledger.facts.get("blocks_not_freed")
        if warning is None or warning.at_ns is None or not isinstance(warning.value, int) or not warning.value:
            return
        at_ns = warning.at_ns
        before = [s for s in ledger.samples if s.at_ns is not None and s.at_ns <= at_ns]
        after = [
            s for s in ledger.samples if s.at_ns is not None and at_ns < s.at_ns <= at_ns + DEFAULT_INTERVAL_S * 1e9
        ]
        if not before or any(sample.running or sample.waiting for sample in (before[-1], *after[:1])):
            return
        if before[-1].running is None or before[-1].waiting is None:
            return
        yield self.holding(
            ledger,
            since_ns=at_ns,
            position=warning.position,
            share_of_pool=None,
            evidence=(
                Evidence("blocks_not_freed", warning.value, "blocks", "log", warning.position),
                Evidence("running", 0, "requests", "log", before[-1].position),
                Evidence("waiting", 0, "requests", "log", before[-1].position),
            ),
            explanation=(
                f"A reset of the prefix cache failed at {clock_time(at_ns)} because {counted(warning.value, 'block')}"
                " were still in use while nothing was running or waiting: no live request holds them."
            ),
            case="From metrics or a log, after a failed reset",
            missing=METRICS_MISSING,
        )

    def _by_signs(self, ledger: EngineLedger, samples: Sequence[Sample], signs: UsageSigns) -> HoldsBlocks:
        series = series_of(samples)
        first, last, since = samples[0], samples[-1], samples[signs.start]
        rises = usage_of(last) - usage_of(first) > 0 and fit_of(series) is not None
        course = ""
        if len({(sample.usage, sample.running) for sample in samples}) > 1 and signs.start:
            course = (
                f" Over all samples, usage went from {percent(usage_of(first))} with {first.running} running to"
                f" {percent(usage_of(last))} with {last.running} running."
            )
        sure = signs.verdict == "likely"
        return self.holding(
            ledger,
            verdict=signs.verdict,
            pending=signs.pending,
            since_ns=since.at_ns or 0,
            position=since.position,
            share_of_pool=None,
            evidence=(*signs.evidence, *(ratchet_evidence(series) if rises else ())),
            explanation=f"{signs.text}{course}"
            + (
                " A warm prefix cache does not explain it either: vLLM counts idle cached blocks as free."
                if sure
                else ""
            ),
            case="From metrics or a log" if sure else signs.case,
            missing=METRICS_MISSING if sure else signs.missing,
        )
