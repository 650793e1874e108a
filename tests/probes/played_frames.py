"""Frames that a bare scheduler's probe sent, played to a Pipeline: what fired when, and what stands at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.contract.wire import Batch, Frame, decode
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.detectors.findings import FindingReport
from kvscope.monitor.ledger.balance import balance_of
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.questions.pipeline import Pipeline

INSTANT_COPIES = Settings({"leak.finished-held.unseen_times": 0})
"""The connectors of these incidents would send at once."""


def frames_in(path: Path) -> Iterator[Frame]:
    """The frames in a file of tests.probes.bare_incidents, in order."""
    with path.open("rb") as file:
        while size := file.read(4):
            yield decode(file.read(int.from_bytes(size, "little")))


class Played:
    """A Pipeline that was fed the frames of one incident. Findings of severity info are left out."""

    def __init__(self, path: Path) -> None:
        self.watch = Pipeline(INSTANT_COPIES)
        self.fired: dict[str, FindingReport] = {}
        """By code, each finding that ever fired, as it was then."""
        self.fired_s: dict[str, float] = {}
        """By code, when it first fired, after the first frame."""
        began_ns = 0
        for frame in frames_in(path):
            began_ns = began_ns or frame.wall_ns
            self.watch.feed([frame])
            for transition in self.watch.take_transitions():
                report = transition.finding.report()
                if transition.to == "firing" and report.severity != "info":
                    self.fired[report.code] = report
                    self.fired_s.setdefault(report.code, (transition.at_ns - began_ns) / 1e9)
        self.watch.settle()

    @property
    def ledgers(self) -> list[EngineLedger]:
        return list(self.watch.fleet.engines.values())

    @property
    def ledger(self) -> EngineLedger:
        (ledger,) = self.ledgers
        return ledger

    def firing(self) -> dict[str, FindingReport]:
        """By code, what fires at the end."""
        return {finding.code: finding for finding in self.watch.findings("firing") if finding.severity != "info"}

    def is_exact(self) -> bool:
        """Whether the ledger adds up, nothing was lost and nothing impossible was seen."""
        return all(
            balance_of(ledger.state).holds and not ledger.losses and not ledger.anomalies for ledger in self.ledgers
        )


def sampled(path: Path, every_s: float, offset_s: float) -> Iterator[Sample]:
    """What a metrics page of the same engine would have shown, scraped so often from so long after the start."""
    ledger = EngineLedger("")
    next_ns, steps = 0, 0
    for frame in frames_in(path):
        if isinstance(frame, Batch):
            ledger.apply(frame)
        if not ledger.points:
            continue
        next_ns = next_ns or ledger.points[0].at_ns + round(offset_s * 1e9)
        if ledger.now_ns >= next_ns:
            next_ns += round(every_s * 1e9)
            steps = ledger.state.totals.steps
            yield _sample(ledger, ledger.points[-1], steps)


def _sample(ledger: EngineLedger, point: Point, steps: int) -> Sample:
    balance = point.balance
    usable = balance.total - balance.reserved
    return Sample(
        engine="sampled",
        position="",
        at_ns=point.at_ns,
        running=point.running,
        waiting=point.waiting,
        usage=(usable - balance.free - balance.cached_idle) / usable,
        preemptions=point.preemptions,
        steps=steps,
        finished=point.finished_requests,
        generation_tokens=ledger.state.totals.output_tokens,
        prompt_tokens_per_s=100.0,
        source="metrics",
    )
