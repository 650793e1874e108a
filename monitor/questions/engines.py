"""An engine at a glance, and whether its clients are served."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

import msgspec

from ..base.text import timestamp
from ..contract.kinds import FIRST_FINISHED, Cause, EngineMode, Status, name_of
from ..contract.samples import Sample
from ..detectors.findings import Finding, severity_at_least
from ..ledger.engine_ledger import EngineLedger
from ..ledger.first_token_pace import SlowClients
from ..ledger.memory_breakdown import measured
from ..ledger.request_latency import SlowView, recent_request_latency, recent_sample_latency
from .availability import known_by
from .schema import EngineView
from .windows import waiting_by_reason

SILENT_AFTER_S: Final = 3.5
RATE_OVER_NS: Final = 5_000_000_000
NO_SETTINGS: Final = (
    "last_stamp",
    "exposition",
    "probed_for_s",
    "probed_since_request_s",
    "requests_since_statistics",
    "halted",
)
"""Facts of how a log ends and how a page is written."""


def engine_view(ledger: EngineLedger, firing: Sequence[Finding]) -> EngineView:
    """Return the view by its stream where there is one, or else by its metrics. `firing`: its findings that fire."""
    slow = ledger.tally.pace.slow
    if ledger.has_stream:
        view = _stream_view(ledger, slow)
    else:
        samples = ledger.samples or [Sample(ledger.engine, "")]
        view = _figures_view(ledger, samples, slow, is_read=not _is_reader_down(ledger))
    return _judged(view, firing)


def past_stream_view(ledger: EngineLedger, firing: Sequence[Finding], live: EngineLedger) -> EngineView:
    """Return an engine as `ledger` has it, at a moment of the past. Only the live ledger knows what was usual then."""
    slow = live.tally.pace.slow_at(ledger.state.now_ns) if live.epoch == ledger.epoch else None
    return _judged(_stream_view(ledger, slow), firing)


def past_metrics_view(ledger: EngineLedger, firing: Sequence[Finding], samples: Sequence[Sample]) -> EngineView:
    """Return an engine without a stream as it was at the last of these samples."""
    at_ns = samples[-1].at_ns or 0
    view = _figures_view(ledger, samples, ledger.tally.pace.slow_at(at_ns), is_read=True)
    return msgspec.structs.replace(_judged(view, firing), at=timestamp(at_ns), last_seen_s_ago=0.0)


def _judged(view: EngineView, firing: Sequence[Finding]) -> EngineView:
    """Return the view with its findings. Its status and they agree: no harm is open on an engine that is *serving*, and
    *stuck*, *slow* and *degraded* cite what is.
    """
    of_engine = [one for one in firing if severity_at_least(one.severity, "warning") and not one.outlasts_epoch]
    harms = sorted({one.judgement.code for one in of_engine})
    status, since = view.status, view.status_since
    if status in ("stuck", "slow") and not harms:
        status, since = "serving", None
    elif status == "serving" and harms:
        status = "degraded"
    return msgspec.structs.replace(
        view,
        status=status,
        status_since=since,
        status_findings=harms if status in ("stuck", "slow", "degraded") else [],
        findings=dict(Counter(one.severity for one in firing)),
    )


def _stream_view(ledger: EngineLedger, slow: SlowClients | None) -> EngineView:
    state, described = ledger.state, ledger.description
    balance = ledger.balance()
    reasons = {name_of(Cause, cause): count for cause, count in ledger.waiting_by_cause().items()}
    running = sum([record.status == Status.RUNNING for record in state.requests.values()])
    status, since_ns = _stream_status(ledger, running, bool(reasons), slow)
    totals = state.totals
    is_there = status not in ("stopped", "silent", "unknown")  # of the others there is no rate now
    output_per_s, computed_per_s = _token_rates(ledger) if is_there else (None, None)
    first_token, queue_time = recent_request_latency(ledger)
    return EngineView(
        engine=ledger.engine,
        model=described.served_model_name or described.model,
        version=" ".join(filter(None, (described.engine, described.version))),
        signal="stream",
        status=status,  # type: ignore[arg-type]
        at=timestamp(ledger.now_ns),
        last_seen_s_ago=round(_silent_s(ledger), 3),
        epoch=ledger.epoch,
        restarts=ledger.restarts,
        step=state.last_step,
        running=running,
        waiting=sum(reasons.values()),
        waiting_by_reason=reasons,
        usage=balance.usage,
        balance=balance,
        output_tokens_per_s=output_per_s,
        computed_tokens_per_s=computed_per_s,
        preemptions=sum(totals.preemptions.values()),
        prefix_hit_rate=totals.hit_tokens / totals.looked_up_tokens if totals.looked_up_tokens else None,
        batches_lost=sum(loss.batches for loss in ledger.losses),
        events_dropped=ledger.dropped_events,
        uncertain_since=timestamp(ledger.uncertain_since_ns),
        faults=list(described.faults),
        configuration={
            field: value
            for field, value in msgspec.to_builtins(described).items()
            if field not in ("faults", "other") and value
        },
        findings={},
        memory=measured(state.memory),
        status_since=timestamp(since_ns) if since_ns else None,
        position=f"{ledger.epoch}/{ledger.sequence}" if ledger.ready else None,
        first_token=first_token,
        queue_time=queue_time,
        slow=_slow_view(slow, since_ns) if status == "slow" else None,
    )


def _silent_s(ledger: EngineLedger) -> float:
    return (ledger.now_ns - ledger.last_received_ns) / 1e9


def _stream_status(ledger: EngineLedger, running: int, has_queue: bool, slow: SlowClients | None) -> tuple[str, int]:
    """Return the status of an engine with a stream, and since when (wall ns), 0 where that is not of interest."""
    if _is_reader_down(ledger):
        return "unknown", 0
    if ledger.state.stopped_ns:
        return "stopped", ledger.wall(ledger.state.stopped_ns)
    if _silent_s(ledger) > SILENT_AFTER_S:
        return "silent", ledger.last_received_ns
    if not (running or has_queue):
        return "idle", 0
    status, since_ns = stream_progress(ledger, running)
    if status == "serving" and slow is not None:
        return "slow", ledger.wall(slow.since_ns)
    return status, since_ns


def _slow_view(slow: SlowClients | None, since_ns: int) -> SlowView | None:
    return SlowView(timestamp(since_ns), slow.p50_s, slow.usual_p95_s, slow.usual_of) if slow is not None else None


def _token_rates(ledger: EngineLedger) -> tuple[float | None, float | None]:
    """Return tokens of output, and computed, per second over the last points, or None while they are too few."""
    recent = [point for point in ledger.points if point.at_ns >= ledger.now_ns - RATE_OVER_NS]
    over_s = (recent[-1].at_ns - recent[0].at_ns) / 1e9 if len(recent) > 1 else 0.0
    if not over_s:
        return None, None
    first, last = recent[0], recent[-1]
    output, computed = last.output_tokens - first.output_tokens, last.computed_tokens - first.computed_tokens
    return round(output / over_s, 1), round(computed / over_s, 1)


def _is_reader_down(ledger: EngineLedger) -> bool:
    """Whether the picture of the engine is as old as its reader's last success."""
    return any(failure.kind == "reader" for failure in ledger.observer_failures)


def present_ns(ledger: EngineLedger) -> int:
    """Return an engine's present (wall). A scrape that fails stores no record: then this machine's clock counts."""
    return time.time_ns() if _is_reader_down(ledger) else ledger.now_ns


def _sample_age_s(ledger: EngineLedger, last: Sample) -> float:
    """Seconds since the last good scrape."""
    now_ns = present_ns(ledger)
    return round(max(now_ns - (last.at_ns or now_ns), 0) / 1e9, 3)


def _figures_view(
    ledger: EngineLedger, samples: Sequence[Sample], slow: SlowClients | None, *, is_read: bool
) -> EngineView:
    """Return the view by the last of these samples. `is_read`: its reader works, or else no rate is known."""
    last = samples[-1]
    facts = {name: fact.value for name, fact in ledger.facts.items() if name not in NO_SETTINGS}
    since_ns = 0
    if not is_read or last.running is None:
        status = "unknown"
    elif last.running or last.waiting:
        status, since_ns = metrics_progress(samples)
        if status == "serving" and slow is not None:
            status, since_ns = "slow", slow.since_ns
    elif is_serving_between(samples):
        status = "serving"
    else:
        status = "idle"
    first_token, queue_time = recent_sample_latency(samples)
    return EngineView(
        engine=ledger.engine,
        model=str(facts.get("served_model_name", facts.get("model", ""))),
        version=str(facts.get("version", "")),
        signal="metrics",
        known_by=known_by(ledger) or "metrics",
        status=status,  # type: ignore[arg-type]
        at=timestamp(ledger.now_ns),
        last_seen_s_ago=_sample_age_s(ledger, last),
        epoch=0,
        restarts=ledger.restarts,
        step=last.steps,
        running=last.running,
        waiting=last.waiting,
        waiting_by_reason=waiting_by_reason(last),
        usage=last.shown_usage,
        balance=None,
        output_tokens_per_s=last.generation_tokens_per_s if is_read else None,
        computed_tokens_per_s=last.prompt_tokens_per_s if is_read else None,
        preemptions=last.preemptions,
        prefix_hit_rate=last.prefix_hit_rate,
        batches_lost=0,
        events_dropped=0,
        uncertain_since=None,
        faults=[],
        configuration=dict(facts),
        findings={},
        status_since=timestamp(since_ns) if since_ns else None,
        first_token=first_token,
        queue_time=queue_time,
        slow=_slow_view(slow, since_ns) if status == "slow" else None,
    )


# -------------------------------------------------------------------- progress


NO_PROGRESS_S: Final = 10.0
"""A shorter pause is a long prompt, a compilation or a garbage collection on most engines."""
LONGEST_STEPS: Final = 3
"""And no pause counts that is shorter than so many times the engine's longest step, or the time between two scrapes."""


def stream_progress(ledger: EngineLedger, running: int) -> tuple[str, int]:
    """Return the status of an engine that is received and has requests, and since when (wall ns) it computes nothing:
    serving (0), paused by its operator, or stuck.
    """
    state = ledger.state
    if state.mode in (EngineMode.PAUSED_ALL, EngineMode.ASLEEP) or (state.mode and not running):
        return "paused", ledger.wall(state.mode_since_ns)
    waits_ns = min(
        (record.arrived_ns or record.since_ns for record in state.requests.values() if record.status < FIRST_FINISHED),
        default=state.now_ns,
    )
    since_ns = ledger.wall(max(state.computed_ns, waits_ns, state.mode_since_ns))
    allowed_ns = max(NO_PROGRESS_S * 1e9, LONGEST_STEPS * state.longest_step_ns)
    return ("stuck", since_ns) if ledger.now_ns - since_ns > allowed_ns else ("serving", 0)


def metrics_progress(samples: Sequence[Sample]) -> tuple[str, int]:
    """Return the same of an engine that is seen through its metrics, and has requests in the last sample."""
    last = samples[-1]
    if last.awake is False:
        return "paused", last.at_ns or 0
    since_ns = at_ns = last.at_ns or 0
    longest_ns = 0
    for sample in reversed(samples):
        longest_ns = max(longest_ns, since_ns - (sample.at_ns or 0))
        if _progress_of(sample) != _progress_of(last) or not (sample.running or sample.waiting):
            break
        since_ns = sample.at_ns or 0
    if _progress_of(last) == (None, None):
        return _progress_by_lines(samples)
    allowed_ns = max(NO_PROGRESS_S * 1e9, LONGEST_STEPS * longest_ns)
    return ("stuck", since_ns) if at_ns - since_ns > allowed_ns else ("serving", 0)


def _progress_by_lines(samples: Sequence[Sample]) -> tuple[str, int]:
    """Return the same by the lines of a log, or by a page that counts nothing. A request that runs may be a prompt that
    is computed for minutes before a line has its tokens. Where none runs, nobody is served.
    """
    stands = list(takewhile(_runs_nothing, reversed(samples)))
    if not stands:
        return "serving", 0
    since_ns, at_ns = stands[-1].at_ns or 0, stands[0].at_ns or 0
    return ("stuck", since_ns) if at_ns - since_ns >= NO_PROGRESS_S * 1e9 else ("unknown", 0)


def _runs_nothing(sample: Sample) -> bool:
    return (
        sample.running == 0
        and bool(sample.waiting)
        and not (sample.generation_tokens_per_s or sample.prompt_tokens_per_s)
    )


def is_serving_between(samples: Sequence[Sample]) -> bool:
    """Return whether requests were served since the sample before the last, though the last has none."""
    if len(samples) < 2 or samples[-1].restarted or samples[-1].awake is False:
        return False
    before, last = samples[-2].generation_tokens, samples[-1].generation_tokens
    return before is not None and last is not None and last > before


def _progress_of(sample: Sample) -> tuple[int | None, int | None]:
    return sample.steps, sample.generation_tokens
