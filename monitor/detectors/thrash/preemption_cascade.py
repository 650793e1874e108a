"""thrash.cascade: one pass preempts many, though nothing becomes free by it."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import Causes, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.preemptions import (
    LOST_EVENTS,
    cost_of,
    freed_nothing,
    preempted_names,
    preemption_passes,
    recent_preemptions,
)
from kvscope.monitor.detectors.sizing.kv_too_small import KvTooSmall
from kvscope.monitor.detectors.thresholds import Settings, Threshold
from kvscope.monitor.detectors.ties import hits_mostly_its_requests
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.text import clock_time, counted


class PreemptionCascade(Detector[Judgement]):
    """Passes that preempted many requests and freed no block."""

    code = "thrash.cascade"
    severity = "warning"
    title = "One pass preempts many requests without freeing a block"
    requires = ("stream",)
    position = 310

    min_requests = Threshold(
        3, "requests", "of two, only the first can be seen to have given nothing back, which may be a chance"
    )
    remember_s = Threshold(120, "s", "a full pool fills up repeatedly, and each time belongs to the same incident")

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the passes that preempted many requests and freed no block."""
        if ledger.has_stream and ledger.preempted:
            yield from self._from_stream(ledger, settings)

    def causes(self) -> Causes[Judgement]:
        """Return what it may cause."""
        return Causes[Judgement]().of(KvTooSmall, hits_mostly_its_requests)

    def _from_stream(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        recent = recent_preemptions(ledger, settings(self.remember_s))
        fewest = settings(self.min_requests)
        found = [one for one in preemption_passes(recent) if len(one) >= fewest and freed_nothing(one)]
        if not found:
            return
        last = found[-1]
        blocks, lost = sum(one.blocks for one in last), sum(one.tokens_lost for one in last)
        yield Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="likely" if ledger.state.damaged else "confirmed",
            since_ns=ledger.wall(found[0][0].at_ns),
            position=ledger.at(found[0][0].at),
            requests=preempted_names([one for together in found for one in together]),
            evidence=(
                *cost_of(ledger, last),
                Evidence(
                    "blocks_freed_during_pass",
                    last[-1].released - last[0].released,
                    "blocks",
                    position=ledger.at(last[-1].at),
                ),
                Evidence("cascades_seen", len(found), "times", position=ledger.at(last[-1].at)),
            ),
            explanation=(
                f"At {clock_time(ledger.wall(last[0].at_ns))} one pass of the scheduler preempted"
                f" {counted(len(last), 'request')} of the {last[0].running} running, but not one block became free:"
                f" the {counted(blocks, 'block')} that they released wait for a step in flight that may still write"
                f" to them, so each preemption led to the next. {counted(lost, 'token')} will be recomputed. Seen"
                f" {counted(len(found), 'time')}."
            ),
            do_now=("Only time is lost: the preempted requests resume by themselves and are recomputed.",),
            change=(
                "Run without overlapped steps until you have a release that waits for blocks being freed (vLLM:"
                " --no-async-scheduling, pull request 49675, kvscope's engine: remove --async-scheduling).",
                "Make preemptions rare: lower --max-num-seqs, or enlarge the pool (--gpu-memory-utilization).",
            ),
            wont_help=("Another preemption order, such as the priority policy: no victim frees a block at once.",),
            missing=LOST_EVENTS if ledger.state.damaged else "",
        )
