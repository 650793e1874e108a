"""stuck.slots-exhausted: slots of requests, adapters, windows or states ran out, not memory."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.text import counted, duration, percent
from ...contract.samples import Sample
from ...ledger.engine_ledger import EngineLedger
from ..advice import seen_by
from ..detector import FromSamples, Settings, Threshold
from ..judgement import Evidence, Judgement, TextJudgement
from ..preemptions import FULL_AT
from ..sample_math import for_room, fullest_pool, last_window, moved, seconds_apart
from ..shared_thresholds import LEAST_SCRAPES
from ..written.written_view import TextDetector, WrittenView, number_of, quotes


class SlotsExhausted(TextDetector):
    """A count of requests that is used up.

    Sees: SGLang's own audit of request slots, which counts slots that belong to no request.
    Likely when: that line is there.
    Not when: its audit of the pool misses blocks as well (leak.unaccounted).
    """

    code = "stuck.slots-exhausted"
    severity = "error"
    title = "Request, adapter or state slots ran out, not KV memory"

    over_s = Threshold(60, "s", "while a request waits: fewer are those that run now, and the next to end makes room")
    idle_share = Threshold(0.5, "of the KV pool", "unused for want of the other pool: less is information")

    def read(self, view: WrittenView) -> Iterator[TextJudgement]:
        """SGLang's audit of request slots."""
        lines = view.lines("slot_audit_failed")
        if not lines or any((number_of(line, "unowned") or 0) > 0 for line in view.lines("pool_audit_failed")):
            return
        line = lines[0]
        missing = (number_of(line, "total") or 0) - (number_of(line, "available") or 0)
        yield view.finding(
            self.code,
            line,
            evidence=(Evidence("missing_slots", round(missing), "slots", "log", line.position), *quotes(lines)),
            explanation=(
                f"{counted(round(missing), 'request slot')} of {number_of(line, 'total') or 0:,.0f}"
                f" {'belongs' if round(missing) == 1 else 'belong'} to no request while nothing is running. Once"
                " all are gone, the engine admits no request, however much memory is free."
            ),
            missing="which request kept its slot",
        )


class SlotsExhaustedFromMetrics(FromSamples, SlotsExhausted):
    """A full pool beside the KV pool: of sliding windows or of Mamba states (SGLang).

    Sees: that pool full for a minute, requests that wait for room, and a KV pool that is not full.
    Likely when: always, since the page does not show whether each of these slots has a live request.
    Not when: no request is retracted and less than half of the KV pool lies idle: that is information.
    """

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the pool that requests wait for."""
        samples, full = ledger.samples, settings(FULL_AT)

        def starves(sample: Sample) -> bool:
            has_room = sample.kv_pool_usage is not None and sample.kv_pool_usage < full
            return has_room and fullest_pool(sample).usage >= full and for_room(sample) > 0

        start = last_window(samples, starves)
        if start is None or len(samples) - start < settings(LEAST_SCRAPES):
            return
        first, last = samples[start], samples[-1]
        if seconds_apart(first, last) < settings(self.over_s):
            return
        pool, kv_pool = fullest_pool(last), last.kv_pool_usage or 0.0
        retracted = moved(first.preemptions, last.preemptions)
        suffers = retracted or kv_pool <= 1 - settings(self.idle_share)
        yield self.finding(
            ledger,
            severity="warning" if suffers else "info",
            since_ns=first.at_ns or 0,
            position=first.position,
            evidence=(
                Evidence("fullest_pool", round(100 * pool.usage, 1), "%", last.source, last.position),
                Evidence("kv_pool", round(100 * kv_pool, 1), "%", last.source, last.position),
                Evidence("waiting", for_room(last), "requests", last.source, last.position),
                Evidence("retracted", retracted, "requests", last.source, last.position),
            ),
            explanation=(
                f"For {duration(seconds_apart(first, last))} the {pool.name} has been at {percent(full)} or more, now"
                f" {percent(pool.usage)}, while requests wait, now {for_room(last):,}. Each request needs room there"
                f" and in the KV pool, of which {percent(1 - kv_pool)} is free."
                + (f" {counted(retracted, 'request')} lost what they had computed meanwhile." if retracted else "")
            ),
            case="A full pool of windows or states",
            missing=f"which requests hold them: {seen_by(ledger)}",
        )
