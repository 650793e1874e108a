"""Notices that the data directory was deleted, became read-only or is full, and reports it as blind.reader-failed."""

from __future__ import annotations

import sqlite3
import time
from typing import Final

from kvscope.monitor.alerting.alerting import Alerts
from kvscope.monitor.history.retention import REPORT_DELETION_S, Keeper
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.supervision import WorkerKind

HISTORY_WORKER: Final = "the history in the data directory"
OUTBOX_WORKER: Final = "the outbox in the data directory"


class DataDirectoryCheck:
    """Checks what `keeper` and `alerts` keep. One thread only."""

    def __init__(self, pipeline: Pipeline, keeper: Keeper | None, alerts: Alerts | None) -> None:
        self._pipeline = pipeline
        self._keeper = keeper
        self._alerts = alerts
        self._restored_s = 0.0

    def check(self) -> None:
        """Check once, and report what changed."""
        if self._keeper is not None:
            self._report(HISTORY_WORKER, self._keeper.problem())
        if self._alerts is not None:
            self._report(OUTBOX_WORKER, self._outbox_problem(self._alerts))

    def _outbox_problem(self, alerts: Alerts) -> str:
        try:
            if alerts.restore_deleted():
                self._restored_s = time.monotonic()
        except (OSError, sqlite3.Error) as error:
            return f"the outbox was deleted and cannot be written again: {error}"
        if self._restored_s and time.monotonic() - self._restored_s < REPORT_DELETION_S:
            return "the outbox was deleted and was written again, with all alerts"
        return ""

    def _report(self, worker: str, problem: str) -> None:
        reported = {failure.worker: failure.error for failure in self._pipeline.supervisor.failures()}
        if not problem:
            self._pipeline.report_recovery(worker)
        elif reported.get(worker) != problem:
            kind: WorkerKind = "history" if worker == HISTORY_WORKER else "delivery"
            self._pipeline.report_failure(worker, kind, problem)
