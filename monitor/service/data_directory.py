"""Notices that the data directory was deleted, became read-only or is full, or that what is copied from it does not
arrive, and reports it as blind.reader-failed.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Final

from kvscope.monitor.alerting.alerting import Alerts
from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriter
from kvscope.monitor.history.retention import REPORT_DELETION_S, Keeper
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.supervision import WorkerKind

HISTORY_WORKER: Final = "the history in the data directory"
OUTBOX_WORKER: Final = "the outbox in the data directory"
ARCHIVE_WORKER: Final = "the archive of the history"
REMOTE_WRITE_WORKER: Final = "remote write of points"
COPIES: Final = (ARCHIVE_WORKER, REMOTE_WRITE_WORKER)
"""Workers that copy what is in the data directory elsewhere. /healthz names them when they are behind."""


class DataDirectoryCheck:
    """Checks what `keeper`, `alerts` and `remote_write` keep and copy. One thread only."""

    def __init__(
        self,
        pipeline: Pipeline,
        keeper: Keeper | None,
        alerts: Alerts | None,
        remote_write: RemoteWriter | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._keeper = keeper
        self._alerts = alerts
        self._remote_write = remote_write
        self._restored_s = 0.0

    def check(self) -> None:
        """Check once, and report what changed."""
        if self._keeper is not None:
            self._report(HISTORY_WORKER, self._keeper.problem())
            if self._keeper.archiver is not None:
                self._report(ARCHIVE_WORKER, self._keeper.archiver.problem())
        if self._alerts is not None:
            self._report(OUTBOX_WORKER, self._outbox_problem(self._alerts))
        if self._remote_write is not None:
            self._report(REMOTE_WRITE_WORKER, self._remote_write.problem())

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
            kind: WorkerKind = "copy" if worker in COPIES else "history" if worker == HISTORY_WORKER else "delivery"
            self._pipeline.report_failure(worker, kind, problem)
