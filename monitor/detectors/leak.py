"""Memory that is never freed.

leak.finished-held needs deferrals and completions of the stream (confirmed) or usage, Running and prompt throughput
over time (likely). leak.unaccounted needs the stream; with an audit since, it is confirmed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from monitor.detectors.figures import DEFAULT_INTERVAL_S, prompt_tokens_until, spaced
from monitor.detectors.judgement import Evidence, Judgement
from monitor.detectors.thresholds import Settings
from monitor.events.kinds import FIRST_FINISHED, Holder
from monitor.events.records import Deferral, RequestState
from monitor.events.sample import Sample
from monitor.ledger.ledger import EngineLedger
from monitor.ledger.words import clock_time, counted, duration, listed, percent

FINISHED_HELD = "leak.finished-held"
UNACCOUNTED = "leak.unaccounted"


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """The leaks of one engine."""
    if ledger.has_stream:
        yield from _finished_held(ledger, settings)
        yield from _unaccounted(ledger, settings)
    elif ledger.samples:
        yield from list(_finished_held_by_figures(ledger, settings)) or _not_freed_at_reset(ledger)


# -------------------------------------------------------------------- leak.finished-held, from the stream


def _finished_held(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    held = [
        deferral
        for deferral in state.deferrals.values()
        if deferral.holder == Holder.CONNECTOR and _has_ended(state.requests.get(deferral.request))
    ]
    overdue = [deferral for deferral in held if _overdue_s(ledger, settings, deferral) > 0]
    if not overdue:
        near = [d for d in held if ledger.age_s(d.since_ns) > settings(FINISHED_HELD, "grace_s") / 2]
        if not near:
            return
        overdue = near
        pending = True
    else:
        pending = state.damaged  # its release may be among what was lost; the next audit tells
    overdue.sort(key=lambda deferral: (deferral.since_ns, deferral.request))
    blocks = sorted(set().union(*(deferral.blocks for deferral in overdue)))
    oldest = overdue[0]
    age = ledger.age_s(oldest.since_ns)
    usable = state.total - state.reserved
    connector = ledger.description.kv_connector
    by = f"the KV connector ({connector})" if connector else "the KV connector"
    prompt_tokens = sum(state.requests[d.request].prompt_tokens for d in overdue if d.request in state.requests)
    yield Judgement(
        code=FINISHED_HELD,
        engine=ledger.engine,
        verdict="likely" if state.damaged else "confirmed",
        pending=pending,
        since_ns=ledger.wall(oldest.since_ns),
        position=str(ledger.position()),
        requests=tuple(deferral.id for deferral in overdue),
        blocks=tuple(blocks),
        evidence=(
            Evidence("requests_held", len(overdue), "requests"),
            Evidence("blocks_held", len(blocks), "blocks"),
            Evidence("share_of_pool", round(len(blocks) / usable, 4), "of the pool"),
            Evidence("oldest_age_s", round(age, 1), "s"),
            Evidence("prompt_tokens_of_them", prompt_tokens, "tokens"),
            Evidence("running", sum(r.is_running for r in state.requests.values()), "requests"),
            Evidence("connector_polls", state.heartbeat.connector_polls if state.heartbeat else "not heard", "polls"),
        ),
        explanation=(
            f"{counted(len(overdue), 'finished request')} still {'holds' if len(overdue) == 1 else 'hold'}"
            f" {counted(len(blocks), 'block')} ({percent(len(blocks) / usable)} of the pool). At the end of each, {by}"
            f" asked to keep its blocks until it had sent them, and has never said that it is done. The oldest,"
            f" {oldest.id}, ended at {clock_time(ledger.wall(oldest.since_ns))}, {duration(age)} ago."
        ),
        do_now=(
            "Look at the other end of the transfers: a consumer that died, or lost them, cannot confirm them.",
            "Only a restart of this engine gives the blocks back; drain it first, before the pool is full.",
        ),
        change=(
            "Give the connector a lease, so that an unconfirmed transfer ends by itself"
            " (vLLM with NIXL: VLLM_NIXL_ABORT_REQUEST_TIMEOUT; kvscope's engine: --kv-lease-seconds).",
            "If requests need not be handed on, run without the connector (vLLM: drop --kv-transfer-config;"
            " kvscope's engine: drop --kv-connector).",
        ),
        wont_help=(
            "Lowering max_num_seqs or the load: live requests do not hold these blocks.",
            "A larger pool (gpu_memory_utilization): it only takes longer to fill.",
            "Resetting the prefix cache: it fails while these blocks are referenced.",
        ),
        missing="the events that were lost" if state.damaged else "",
    )  # fmt: skip


def _has_ended(record: RequestState | None) -> bool:
    """Also true of one that the books have forgotten because all its blocks were detached."""
    return record is None or record.status >= FIRST_FINISHED


def _overdue_s(ledger: EngineLedger, settings: Settings, deferral: Deferral) -> float:
    """Seconds beyond its lease, or beyond the grace if it has none."""
    if deferral.lease_deadline_ns:
        past = (ledger.now_ns - ledger.wall(deferral.lease_deadline_ns)) / 1e9
        return past - settings(FINISHED_HELD, "lease_slack_s")
    return ledger.age_s(deferral.since_ns) - settings(FINISHED_HELD, "grace_s")


# -------------------------------------------------------------------- leak.unaccounted


def _unaccounted(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    state = ledger.state
    unexplained = state.unexplained_references()
    if not unexplained:
        return
    unaccounted = set(state.unaccounted())
    culprits = [
        record
        for record in state.requests.values()
        if record.is_finished and not unexplained.keys().isdisjoint(record.blocks)
    ]
    ended = [ledger.wall(record.finished_ns) for record in culprits if record.finished_ns]
    since = min(ended, default=ledger.wall(min((state.since[b] for b in unexplained), default=0)))
    age = (ledger.now_ns - since) / 1e9
    audited = bool(state.audited_ns) and ledger.wall(state.audited_ns) >= since and not state.damaged
    shared = len(unexplained) - len(unaccounted)
    usable = state.total - state.reserved
    explanation = (
        f"{counted(sum(unexplained.values()), 'reference')} to {counted(len(unexplained), 'block')} belong to no living"
        f" request and to no announced deferral; {counted(len(unaccounted), 'block')}"
        f" ({percent(len(unaccounted) / usable)} of the pool) can never be used again"
    )
    if shared:
        explanation += f", {counted(shared, 'more is', 'more are')} still shared with living requests and will follow"
    explanation += "."
    if culprits:
        explanation += f" They were left by {listed([r.id for r in culprits])}: ended, and their free was skipped."
    yield Judgement(
        code=UNACCOUNTED,
        engine=ledger.engine,
        verdict="confirmed" if audited else "likely",
        # Until an audit has put the books right after a loss, what is missing may be missing from them alone.
        pending=state.damaged or age < settings(UNACCOUNTED, "grace_s"),
        since_ns=since,
        position=str(ledger.position()),
        requests=tuple(record.id for record in culprits),
        blocks=tuple(unexplained),
        evidence=(
            Evidence("unaccounted_blocks", len(unaccounted), "blocks"),
            Evidence("unexplained_references", sum(unexplained.values()), "references"),
            Evidence("share_of_pool", round(len(unaccounted) / usable, 4), "of the pool"),
            Evidence("requests_that_left_them", len(culprits), "requests"),
            Evidence("audits_since", int(audited), "audits", "audit"),
        ),
        explanation=explanation,
        do_now=(
            "Only a restart of this engine gives the blocks back; drain it first, before the pool is full.",
            "Keep the story of one of these blocks (monitor explain block ID): it names the path that left it.",
        ),
        change=(
            "It is a defect of the engine on the path that ended these requests: report it with that story, and"
            " upgrade to a release that has it fixed.",
        ),
        wont_help=(
            "Lowering the load or max_num_seqs: no live request holds these blocks.",
            "Resetting the prefix cache: a reference count above 0 keeps a block out of the free queue for ever.",
        ),
        missing="" if audited else "an audit of the engine's own reference counts since then (one comes by itself)",
    )  # fmt: skip


# -------------------------------------------------------------------- leak.finished-held, from figures alone


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
    "Give the connector a lease (vLLM with NIXL: VLLM_NIXL_ABORT_REQUEST_TIMEOUT), or run without it if requests need"
    " not be handed on (drop --kv-transfer-config).",
)
_MISSING_BY_FIGURES = (
    "which request owns each block, and whether its free was deferred: attach the event stream (monitor doctor"
    " tcp://HOST:5757). That also tells this from leak.unaccounted."
)


def _finished_held_by_figures(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    samples = [s for s in ledger.samples if s.usage is not None and s.running is not None]
    if len(samples) < 2:
        return
    # After a drain to nothing running, usage says what no live request holds.
    floor = _idle_floor(samples, settings)
    series = _series(samples) if _may_ratchet(samples, settings) else None
    fit = _ratchet(series, settings) if series is not None else None
    if floor is None and fit is None:
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
