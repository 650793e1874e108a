"""The open findings, and the observer itself."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from ..objectives import UNDELIVERED_AFTER_S
from . import panels
from .panels import BAD, EVENTS_S, FINDING_COUNTS, GRID_WIDTH, SELECTED, SEVERITY_COLOURS, TARGETS, Panel


def findings_page() -> Dashboard:
    """Return the page of findings."""
    return panels.grafana_page(
        "findings",
        "kvscope / Findings",
        "Open findings, and how reliable they are.",
        _panels(),
        view="findings",
    )


def _panels() -> Iterator[Panel | Row]:
    yield Row("Findings")
    yield panels.linked(
        panels.to_web_app(
            panels.table_panel(
                "Findings that are firing, warning or worse",
                "Current findings by code, with their verdict: confirmed or likely. The code links to its runbook."
                " Culprits, evidence and steps are not here: open kvscope or run `monitor doctor`.",
                f"sum by (engine, code, severity, verdict) (kvscope_findings{{{SELECTED}, {BAD}}})",
                ("severity", "code", "verdict", "engine"),
            ),
            "findings",
        ),
        "code",
        "Runbook",
        "${kvscope:raw}/docs/runbooks/${__value.raw}.md",
    )
    by_severity = panels.stacked(
        "Findings by severity",
        "The number of firing findings. Effects of another finding do not fire and are not counted.",
        (f"sum by (severity) (kvscope_findings{{{SELECTED}}})", "{{severity}}"),
        unit=FINDING_COUNTS,
        width=GRID_WIDTH // 3,
    )
    yield panels.with_colours(by_severity, SEVERITY_COLOURS)
    yield panels.stacked(
        "Findings by code",
        "A band for each code, from the end of its pending period until it resolves. A finding that comes and goes"
        " between two scrapes does not appear.",
        (f"sum by (code) (kvscope_findings{{{SELECTED}}})", "{{code}}"),
        unit=FINDING_COUNTS,
        width=GRID_WIDTH,
    )
    yield Row("Alerts")
    yield from _alert_panels()
    yield Row("Event streams")
    yield from _stream_panels()
    yield Row("The kvscope service")
    yield from _service_panels()


def _alert_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Oldest undelivered alert",
        "How long the oldest message to each receiver has waited, if kvscope sends alerts itself (--alert). A"
        " rising line is a receiver that does not answer. It does not show whether anybody read the alert.",
        (f"max by (receiver) (kvscope_alerts_oldest_pending_seconds{{{TARGETS}}})", "{{receiver}}"),
        unit="s",
        bad_from=UNDELIVERED_AFTER_S,
    )
    yield panels.lines(
        "Alert deliveries by outcome",
        "Messages to receivers by outcome, and those that wait. Messages given up were not delivered: `monitor"
        " alerts list` lists them and `monitor alerts replay` resends one. Silenced alerts are not included.",
        (panels.increase("kvscope_alerts_deliveries_total", "outcome", TARGETS), "{{outcome}}"),
        (f"sum(kvscope_alerts_pending{{{TARGETS}}})", "waiting"),
        unit="suffix: messages",
    )
    yield panels.lines(
        "Alerts open, and silences",
        "Alerts sent as firing and not yet as resolved, and active silences. A silenced finding still fires: it is"
        " among the findings.",
        (f"sum(kvscope_alerts_open{{{TARGETS}}})", "open"),
        (f"sum(kvscope_alerts_silences{{{TARGETS}}})", "silences"),
    )


def _stream_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Batches lost of the event stream",
        "Event batches lost for good, by the stage that lost them. Any loss makes the values inexact until the next"
        " complete audit. With a journal (--journal), only the engine's buffer can lose batches.",
        (panels.increase("kvscope_stream_batches_lost_total", "stage"), "{{stage}}"),
        unit="suffix: batches",
    )
    yield panels.lines(
        "Events that the engine dropped",
        "Events in the batches that the engine's own buffer dropped because its drain did not keep up. Their"
        " content is unknown.",
        (panels.increase("kvscope_stream_events_dropped_total", "engine"), "{{engine}}"),
        unit="suffix: events",
    )
    yield panels.lines(
        "Lag behind the engine",
        "The time from when the engine packed its last batch until kvscope received it. This compares the clocks of"
        " two machines and includes their difference.",
        (f"max by (source) (kvscope_source_lag_seconds{{{TARGETS}}})", "{{source}}"),
        unit="s",
    )


def _service_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Sources in step",
        "1 while no batch of a source is missing. /api/sources lists the missing ones.",
        (f"min by (source) (kvscope_source_in_step{{{TARGETS}}})", "{{source}}"),
        good_from=1,
    )
    yield panels.lines(
        "Monitoring overhead, CPU seconds per second",
        "Time spent on reading, the ledger and detectors, by source, and by the whole service with its web app. The"
        " engine's own cost of publishing is not included.",
        (panels.rate("kvscope_source_cpu_seconds_total", "source", TARGETS), "{{source}}"),
        (panels.rate("process_cpu_seconds_total", "instance", TARGETS), "the service, {{instance}}"),
        unit="percentunit",
    )
    yield panels.lines(
        "Memory of the service",
        "Resident memory of kvscope itself. It grows with the pool and the stored recent past up to a bound, so"
        " growth alone is not a leak.",
        (f"sum by (instance) (process_resident_memory_bytes{{{TARGETS}}})", "{{instance}}"),
        unit="bytes",
    )
    yield panels.lines(
        "Batches requested again, per second",
        "Batches that did not arrive by themselves, by where the engine took them from. This is not a loss, but a"
        " warning sign. The panel is empty if it never happened.",
        (panels.rate("kvscope_source_batches_filled_total", "supplier", TARGETS), "{{supplier}}"),
        unit=EVENTS_S,
        width=GRID_WIDTH // 2,
    )
    yield panels.lines(
        "Sent by OpenTelemetry, and lost on the way, per second",
        "Signals that reached the collector and signals that did not. The panel is empty without --otlp.",
        (panels.rate("kvscope_otlp_sent_total", "signal", TARGETS), "sent, {{signal}}"),
        (panels.rate("kvscope_otlp_dropped_total", "signal", TARGETS), "lost, {{signal}}"),
        unit=EVENTS_S,
        width=GRID_WIDTH // 2,
    )
