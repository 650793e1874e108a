"""blind.reader-failed: a part of the service that an engine's picture rests on does not work."""

from __future__ import annotations

from collections.abc import Iterator

from kvscope.monitor.detectors.detector import SIGNALS, Detector
from kvscope.monitor.detectors.judgement import Evidence, Judgement
from kvscope.monitor.detectors.thresholds import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.supervision import WorkerFailure
from kvscope.monitor.text import clock_time, counted

_CONSEQUENCES = {
    "reader": "All views of this engine are as old as that, and show nothing about its current state",
    "detector": "Problems that this detector finds are not reported meanwhile",
    "delivery": "Findings may not reach their receivers and exporters meanwhile",
    "history": "The past of this engine may have a gap from then on",
    "copy": "Copies elsewhere lack the latest of this engine meanwhile. The views here do not depend on them",
    "discovery": "The last list of engines stays in force. Engines that came since are not watched",
}


class ReaderFailed(Detector[Judgement]):
    """Readers, detectors, exporters and history that raised or hang."""

    code = "blind.reader-failed"
    severity = "info"
    title = "A part of the monitor failed"
    requires = SIGNALS
    position = 845

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield each failure that lasts, of a worker that the engine's picture rests on."""
        for failure in ledger.observer_failures:
            yield self._judge_worker(ledger, failure)

    def _judge_worker(self, ledger: EngineLedger, failure: WorkerFailure) -> Judgement:
        is_reader = failure.kind == "reader"
        return Judgement(
            code=self.code,
            engine=ledger.engine,
            verdict="confirmed",
            key=failure.worker,
            since_ns=failure.since_ns,
            evidence=(
                Evidence("worker", failure.worker, "", "kvscope"),
                Evidence("worker_error", failure.error, "", "kvscope"),
                Evidence("worker_failures", failure.times, "times", "kvscope"),
            ),
            explanation=(
                f"In kvscope, {failure.worker} has not worked since {clock_time(failure.since_ns)}: {failure.error}"
                f" ({counted(failure.times, 'failure')}). {_CONSEQUENCES[failure.kind]}. kvscope tries again by"
                " itself."
            ),
            do_now=(
                *(("Check that the engine, or the server that it is read from, answers.",) if is_reader else ()),
                "Read the service's log: the failure is in it once, with its traceback if kvscope did not expect it.",
            ),
            change=("Report a traceback as a defect of kvscope.",),
            wont_help=(
                "Waiting for findings: until the reader works again, a healthy engine and a stuck one look the same."
                if is_reader
                else "Restarting the engine: the failure is in the monitor.",
            ),
        )
