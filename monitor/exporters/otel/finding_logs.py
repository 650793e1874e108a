"""A finding that begins to fire, or is resolved, as a log record: an event named kvscope.finding."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import NonRecordingSpan, SpanContext, set_span_in_context

from kvscope.monitor.detectors.judgement import Severity
from kvscope.monitor.exporters.otel.request_spans import SCOPE
from kvscope.monitor.findings import Transition

MAX_LOGGED_CULPRITS: Final = 100
OTEL_SEVERITIES: Final[Mapping[Severity, tuple[str, SeverityNumber]]] = {
    "info": ("INFO", SeverityNumber.INFO),
    "warning": ("WARN", SeverityNumber.WARN),
    "error": ("ERROR", SeverityNumber.ERROR),
    "critical": ("FATAL", SeverityNumber.FATAL),
}


def log_of(transition: Transition, culprit: SpanContext | None, resource: Resource) -> ReadableLogRecord:
    """One transition. `culprit`: the root span of a request that it is about, if there is one.

    The finding's own severity is an attribute. The record's is INFO when it is resolved.
    """
    report = transition.finding.report()
    text, number = OTEL_SEVERITIES[report.severity if transition.to == "firing" else "info"]
    record = LogRecord(
        timestamp=transition.at_ns,
        observed_timestamp=time.time_ns(),
        context=set_span_in_context(NonRecordingSpan(culprit)) if culprit is not None else None,
        severity_text=text,
        severity_number=number,
        event_name="kvscope.finding",
        body=report.explanation,
        attributes={
            "kvscope.finding.id": report.id,
            "kvscope.finding.code": report.code,
            "kvscope.finding.title": report.title,
            "kvscope.finding.state": transition.to,
            "kvscope.finding.severity": report.severity,
            "kvscope.finding.verdict": report.verdict,
            "kvscope.finding.since": report.since or "",
            "kvscope.finding.runbook": report.runbook,
            "kvscope.finding.do_now": report.do_now,
            "kvscope.finding.change": report.change,
            "kvscope.culprits.requests": report.culprits.requests[:MAX_LOGGED_CULPRITS],
            "kvscope.culprits.blocks": len(report.culprits.blocks),
            "kvscope.engine": report.engine,
        },
    )
    return ReadableLogRecord(record, resource, SCOPE)
