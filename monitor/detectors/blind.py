"""What the observer itself cannot see. Information, never above."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.sample_math import DEFAULT_INTERVAL_S, apart_s
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted, duration

STREAM_GAP = "blind.stream-gap"
LOG_SILENCE = "blind.log-silence"
NOT_EXPOSED = "blind.not-exposed"
COUNTER_LAG = "blind.counter-lag"
UNREADABLE: Final = "what the engine sent cannot be read"
"""The ledger's name for events not laid out as the contract says: lost to us, and nothing known of the engine's own
memory."""


class _Figure(NamedTuple):
    """A figure of a metrics page: its name there, and what cannot be said, or only with less certainty, without it."""

    metric: str
    needed_for: str


FIGURES: Final[dict[str, _Figure]] = {
    "running": _Figure("vllm:num_requests_running", "every judgement"),
    "waiting": _Figure("vllm:num_requests_waiting", "collapse.lockstep and stuck.never-fits"),
    "usage": _Figure("vllm:kv_cache_usage_perc", "leak.finished-held, collapse.lockstep and stuck.never-fits"),
    "steps": _Figure("vllm:iteration_tokens_total_count", "stuck.engine-stalled (with it: likely)"),
    "deferred": _Figure("vllm:num_requests_waiting_by_reason", "stuck.never-fits (with it: likely)"),
    "finished": _Figure("vllm:request_success_total", "how requests of collapse.lockstep ended"),
    "preemptions": _Figure("vllm:num_preemptions_total", "whether collapse.lockstep was preemption"),
}
_HOW_TO_GET: Final = {
    "vllm": "Upgrade vLLM: 0.20 and later expose all of them, unless --disable-log-stats is given.",
    "sglang": "No flag of SGLang adds them: the event stream of a probe would.",
    "kvscope": "Attach the event stream (--events of the engine, monitor doctor tcp://HOST:5757): it says all of it.",
}


def judge(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """What was lost of one engine's stream, or what its metrics page or its log cannot say."""
    yield from _stream_gap(ledger, settings)
    if ledger.has_stream or not ledger.samples:
        return
    if ledger.samples[-1].source == "log":
        yield from _log_silence(ledger, settings)
    else:
        yield from _not_exposed(ledger)
        yield from _counter_lag(ledger)


LINES_MISSING: Final = 3
"""In a row: where lines are further apart than vLLM's ten seconds, so many of them are waited for."""


def _log_silence(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    """vLLM leaves its lines out as soon as no token is computed, be it that nobody asks or that it hangs."""
    last = ledger.samples[-1]
    if not (last.running or last.waiting):
        return
    goes_on = ledger.facts.get("last_stamp")
    silent_s = (goes_on.at_ns - last.at_ns) / 1e9 if goes_on and goes_on.at_ns and last.at_ns else 0.0
    allowed = max(settings(LOG_SILENCE, "silent_s"), LINES_MISSING * _interval_s(list(ledger.samples)))
    stood_still = last.prompt_tokens_per_s == 0 and last.generation_tokens_per_s == 0
    if silent_s < allowed and not stood_still:
        return
    running, waiting = last.running or 0, last.waiting or 0
    known = silent_s >= allowed
    yield Judgement(
        code=LOG_SILENCE,
        engine=ledger.engine,
        verdict="confirmed" if known else "cannot-tell",
        since_ns=last.at_ns or 0,
        position=last.position,
        evidence=(
            Evidence("running", running, "requests", "log", last.position),
            Evidence("waiting", waiting, "requests", "log", last.position),
            Evidence("silent_s", round(silent_s, 1), "s", "log", goes_on.position if goes_on else ""),
        ),
        explanation=(
            f"The last line with figures has {counted(running, 'request')} running and {waiting:,} waiting; "
            + (f"the log goes on for {duration(silent_s)} without another. " if known else "it is the log's last. ")
            + "vLLM leaves these lines out while no token is computed, so their absence does not mean that nothing was"
            " asked for: an engine that hangs is as silent as one that is idle."
        ),
        do_now=("Look at the engine itself, not at its log: its metrics page, or monitor doctor tcp://HOST:5757.",),
        missing="" if known else "what came after it: a log that goes on for longer, or the metrics page",
    )


def _interval_s(samples: Sequence[Sample]) -> float:
    """Between two of the log's lines, as it was until the last."""
    apart = [s for earlier, later in pairwise(samples) if (s := apart_s(earlier, later))]
    return statistics.median(apart) if apart else DEFAULT_INTERVAL_S


def _not_exposed(ledger: EngineLedger) -> Iterator[Judgement]:
    last = ledger.samples[-1]
    absent = [figure for field, figure in FIGURES.items() if getattr(last, field) is None]
    if not absent:
        return
    yield Judgement(
        code=NOT_EXPOSED,
        engine=ledger.engine,
        verdict="confirmed",
        position=last.position,
        evidence=tuple(Evidence(figure.metric, "not exposed", "", last.source, last.position) for figure in absent),
        explanation=(
            "Not exposed, which is not 0: "
            + "; ".join(f"{figure.metric}, needed for {figure.needed_for}" for figure in absent)
            + "."
        ),
        change=(_HOW_TO_GET[_dialect(ledger)],),
    )


def _counter_lag(ledger: EngineLedger) -> Iterator[Judgement]:
    last = ledger.samples[-1]
    if last.preemptions is None or _dialect(ledger) != "vllm":
        return
    yield Judgement(
        code=COUNTER_LAG,
        engine=ledger.engine,
        verdict="confirmed",
        position=last.position,
        evidence=(Evidence("preemptions_counted", last.preemptions, "preemptions", last.source, last.position),),
        explanation=(
            f"vllm:num_preemptions_total ({last.preemptions:,} now) moves only with a preempted request's next token:"
            " seconds late, and never if the request is aborted before. Clients that disconnect are counted nowhere,"
            " tokens computed again after a preemption in no token counter, and gauges are those of the last step that"
            " ended."
        ),
        change=(
            "Where it matters, attach the event stream (monitor doctor tcp://HOST:5757): each preemption and each abort"
            " is in it when it happens.",
        ),
    )


def _dialect(ledger: EngineLedger) -> str:
    fact = ledger.facts.get("exposition")
    return str(fact.value) if fact is not None else "vllm"


def _stream_gap(ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
    remember_ns = settings(STREAM_GAP, "remember_s") * 1e9
    losses = [loss for loss in ledger.losses if ledger.uncertain_since_ns or ledger.now_ns - loss.at_ns < remember_ns]
    if not losses:
        return
    batches = sum(loss.batches for loss in losses)
    unreadable = [found for found in ledger.anomalies if found.anomaly.what == UNREADABLE]
    if ledger.uncertain_since_ns:
        since = clock_time(ledger.uncertain_since_ns)
        state = f"Figures since {since} may be wrong until the engine's next complete audit."
    else:
        state = "The state is exact again; what happened in between is not known."
    yield Judgement(
        code=STREAM_GAP,
        engine=ledger.engine,
        verdict="confirmed",
        since_ns=losses[0].at_ns,
        position=losses[0].position,
        evidence=(
            Evidence("batches_lost", batches, "batches", position=losses[-1].position),
            Evidence("events_dropped_in_engine", ledger.dropped_events, "events", position=losses[-1].position),
            *(Evidence("lost_at_stage", loss.stage.name.lower(), "", "stream", loss.position) for loss in losses[:3]),
            *(Evidence("unreadable", f.anomaly.detail, "", "stream", str(f.position)) for f in unreadable[:3]),
        ),
        explanation=(
            f"{counted(batches, 'batch', 'batches')} of events {'was' if batches == 1 else 'were'} lost for good."
            f" {state}"
        ),
        do_now=("Nothing, if it stays at this.",),
        change=("If it goes on: give the engine a journal (--journal DIR), from which gaps are filled.",),
    )
