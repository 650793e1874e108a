"""blind.reader-failed: a part of the service that an engine's picture rests on does not work.

A failure that concerns one engine is a warning of it. One that concerns several, or the service as a whole, is one
warning under the observer's own name, and information of each engine: a full disk is one alert, not fifty. A source
that was never heard has no engine yet: its target's name stands for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ...base.supervision import WorkerFailure
from ...base.text import clock_time, counted
from ...ledger.engine_ledger import EngineLedger
from ..detector import SIGNALS, Detector, Settings
from ..judgement import Evidence, Judgement
from ..measured_harm import verdict_of
from ..runbook_files import FindingFields, with_advice

_CONSEQUENCES = {
    "reader": "All views of what it reads are as old as that, and show nothing about the current state",
    "detector": "Problems that this detector finds are not reported meanwhile",
    "delivery": "Findings may not reach their receivers and exporters meanwhile",
    "history": "The past may have a gap from then on",
    "copy": "Copies elsewhere lack the latest meanwhile. The views here do not depend on them",
    "discovery": "The last list of engines stays in force. Engines that came since are not watched",
}
ONE_ATTEMPT_NS: Final = 10_000_000_000
"""One failed attempt of a reader is a gap that the next may close, and a page is scraped every 5 s, for 4.5 s at most.
After this long it is none.
"""


def is_gap(failure: WorkerFailure, now_ns: int) -> bool:
    """Whether the failure is one attempt of a reader, just now (wall ns)."""
    return failure.kind == "reader" and failure.times == 1 and now_ns - failure.since_ns < ONE_ATTEMPT_NS


def judged_failure(name: str, failure: WorkerFailure, *, is_grave: bool) -> Judgement:
    """Return the judgement of a failure under the name of an engine, of a source's target or of the observer."""
    fields = FindingFields(
        verdict="confirmed",
        key=failure.worker,
        severity=None if is_grave else "info",
        since_ns=failure.since_ns,
        evidence=(
            Evidence("worker", failure.worker, "", "kvscope"),
            Evidence("worker_error", failure.error, "", "kvscope"),
            Evidence("worker_failures", failure.times, "times", "kvscope"),
        ),
        explanation=(
            f"In kvscope, {failure.worker} has not worked since {clock_time(failure.since_ns)}: {failure.error}"
            f" ({counted(failure.times, 'failure')}). {_CONSEQUENCES[failure.kind]}. kvscope tries again by itself."
        ),
        case="A reader" if failure.kind == "reader" else "",
    )
    return Judgement(ReaderFailed.code, name, **with_advice(ReaderFailed.code, fields))


class ReaderFailed(Detector[Judgement]):
    """Readers, detectors, exporters and history that raised or hang.

    Sees: a part of the monitor that the picture of this engine rests on, and that does not work.
    Confirmed when: always, since the failure is kvscope's own record.
    Not when: one attempt of a reader failed just now.
    """

    code = "blind.reader-failed"
    severity = "warning"
    title = "A part of the monitor failed"
    outlasts_epoch = True
    requires = SIGNALS

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield each failure that lasts, of a worker that the engine's picture rests on."""
        for failure in ledger.observer_failures:
            judged = judged_failure(ledger.engine, failure, is_grave=failure.worker in ledger.grave_failures)
            yield verdict_of(ledger, judged, self.severity, self.alternatives)
