"""Hands on what the watch found: to the findings log, alerts, the log of the process, OpenTelemetry and exemplars."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..detectors.findings import Transition, severity_at_least
from ..history.findings_log import FindingsLog
from ..outputs.alerting.alerting import Alerts
from ..outputs.alerting.message import AlertSelection
from ..outputs.otel.otel_exporter import OtelOutlet
from ..outputs.otel.request_spans import callers_of
from ..outputs.prometheus.service_metrics import Exemplars
from ..questions.pipeline import EndedRequest, Pipeline

if TYPE_CHECKING:
    from ..fleet.bus_link import BusLink

logger = logging.getLogger(__name__)


class Deliveries:
    """Takes transitions and ended requests from `watch`. Thread-safe: every reader delivers after it fed the watch."""

    def __init__(
        self, watch: Pipeline, exemplars: Exemplars, alerts: Alerts | None, findings_log: FindingsLog | None
    ) -> None:
        self.otel: OtelOutlet | None = None
        self._watch = watch
        self._exemplars = exemplars
        self._alerts = alerts
        self._findings_log = findings_log
        self._lock = threading.Lock()
        self.bus: BusLink | None = None
        """Where every transition goes at once, before alerts."""
        self._changes = AlertSelection("cannot-tell")
        """So that a hub learns of a change of verdict or severity: it decides by them what to send."""
        self._undelivered: list[Transition] = []

    def deliver(self) -> None:
        """Hand on what is new."""
        with self._lock:
            transitions = self._watch.take_transitions()
            self._keep_findings(transitions)
            if self.bus is not None:
                self.bus.put(self._changes.select(transitions))
            self._alert(transitions)
            _log_transitions(transitions)
            if self.otel is not None:
                self.otel.report(transitions)
            self._trace(self._watch.take_ended())

    def discard(self) -> None:
        """Drop what is new: of a recording, it was reported when it was live."""
        with self._lock:
            self._watch.take_transitions()
            self._watch.take_ended()

    def _keep_findings(self, transitions: Sequence[Transition]) -> None:
        try:
            if self._findings_log is not None:
                self._findings_log.append(list(transitions))
        except OSError as error:
            if transitions:
                logger.error("what is found is not kept, and is tried again: %s", error)

    def _alert(self, new: Sequence[Transition]) -> None:
        """Write it to the outbox, or keep it for the next attempt if that fails (a full disk, for example)."""
        if self._alerts is None:
            return
        transitions = [*self._undelivered, *self._alerts.select(new)]
        try:
            self._alerts.put(transitions)
            self._undelivered = []
        except sqlite3.Error as error:
            if transitions != self._undelivered:
                logger.error("the outbox of alerts cannot be written and is tried again: %s", error)
            self._undelivered = transitions

    def _trace(self, ended: list[EndedRequest]) -> None:
        traced = self.otel.send(ended) if self.otel is not None else callers_of(ended)
        for (engine, record, offset), span in traced:
            at_s = (record.finished_ns + offset) / 1e9
            self._exemplars.note(engine, record, at_s, span.trace_id, span.span_id)


def _log_transitions(transitions: Sequence[Transition]) -> None:
    for transition in transitions:
        judged = transition.finding.judgement
        level = logging.WARNING if severity_at_least(transition.finding.severity, "warning") else logging.INFO
        logger.log(level, "%s %s on %s: %s", transition.to, judged.code, judged.engine, judged.explanation)
