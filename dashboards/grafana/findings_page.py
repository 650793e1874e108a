"""What is judged to be wrong, and the observer itself."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from kvscope.dashboards.grafana.dashboard_frame import grafana_page
from kvscope.dashboards.grafana.panels import (
    BAD,
    EVENTS_S,
    GRID_WIDTH,
    SELECTED,
    SEVERITY_COLOURS,
    TARGETS,
    Panel,
    lines,
    linked,
    row_heading,
    stacked,
    table_panel,
    to_web_app,
    with_colours,
)
from kvscope.dashboards.objectives import UNTOLD_AFTER_S


def findings_page() -> Dashboard:
    """The page."""
    return grafana_page(
        "findings",
        "kvscope / Findings",
        "What is wrong, and how far to trust that.",
        _findings_panels(),
        view="findings",
    )


def _findings_panels() -> Iterator[Panel | Row]:
    yield row_heading("Findings")
    yield linked(
        to_web_app(
            table_panel(
                "Findings that are firing, warning or worse",
                "What is wrong now, by class, with how kvscope knows: confirmed by the stream, or likely. The code"
                " leads to its runbook. Who is to blame, the evidence and what to do are not here: open kvscope, or run"
                " `monitor doctor`.",
                f"sum by (engine, code, severity, verdict) (kvscope_findings{{{SELECTED}, {BAD}}})",
                ("severity", "code", "verdict", "engine"),
            ),
            "findings",
        ),
        "code",
        "Runbook",
        "${kvscope:raw}/docs/runbooks/${__value.raw}.md",
    )
    by_severity = stacked(
        "Findings by severity",
        "How many fire. What another finding explains does not fire itself and is not counted.",
        (f"sum by (severity) (kvscope_findings{{{SELECTED}}})", "{{severity}}"),
        width=GRID_WIDTH // 3,
    )
    yield with_colours(by_severity, SEVERITY_COLOURS)
    yield stacked(
        "Findings by code",
        "A band for each class, from when it began to fire, past its grace, until it ended. One that comes and goes"
        " between two scrapes is not seen here.",
        (f"sum by (code) (kvscope_findings{{{SELECTED}}})", "{{code}}"),
        width=GRID_WIDTH,
    )
    yield row_heading("Alerts")
    yield from _alert_panels()
    yield row_heading("Event streams")
    yield from _stream_panels()
    yield row_heading("The kvscope service")
    yield from _service_panels()


def _alert_panels() -> Iterator[Panel]:
    yield lines(
        "Oldest alert that is not told yet",
        "For how long the oldest message to each receiver has waited, if kvscope tells of findings itself (--alert). A"
        " line that rises is a receiver that does not answer. It does not tell whether anybody read what arrived.",
        (f"max by (receiver) (kvscope_alerts_oldest_pending_seconds{{{TARGETS}}})", "{{receiver}}"),
        unit="s",
        bad_from=UNTOLD_AFTER_S,
    )
    yield lines(
        "Alerts by what became of them",
        "Messages to receivers that are over, by outcome, and those that wait. given-up ones were not told: `monitor"
        " alerts list` has them, and replays one. What a silence holds back is not in it.",
        (
            f"sum by (outcome) (increase(kvscope_alerts_deliveries_total{{{TARGETS}}}[$__rate_interval]))",
            "{{outcome}}",
        ),
        (f"sum(kvscope_alerts_pending{{{TARGETS}}})", "waiting"),
    )
    yield lines(
        "Alerts open, and silences",
        "Alerts that were told to fire and not yet to be over, and silences that hold. What a silence keeps from being"
        " told fires nevertheless: it is among the findings.",
        (f"sum(kvscope_alerts_open{{{TARGETS}}})", "open"),
        (f"sum(kvscope_alerts_silences{{{TARGETS}}})", "silences"),
    )


def _stream_panels() -> Iterator[Panel]:
    yield lines(
        "Batches lost of the event stream",
        "Batches of events that nobody could supply, by the stage that lost them. Any loss makes the figures inexact"
        " until the next whole audit; what it hid is not known. With a journal (--journal) only the engine's buffer can"
        " lose any.",
        (
            f"sum by (stage) (increase(kvscope_stream_batches_lost_total{{{SELECTED}}}[$__rate_interval]))",
            "{{stage}}",
        ),
    )
    yield lines(
        "Events that the engine dropped",
        "Events in the batches that the engine's own buffer dropped, since its drain did not keep up. What they said is"
        " not known.",
        (
            f"sum by (engine) (increase(kvscope_stream_events_dropped_total{{{SELECTED}}}[$__rate_interval]))",
            "{{engine}}",
        ),
    )
    yield lines(
        "Lag behind the engine",
        "From when the engine packed its last batch until kvscope had it. Two machines' clocks are compared: what their"
        " difference adds, it cannot tell.",
        (f"max by (source) (kvscope_source_lag_seconds{{{TARGETS}}})", "{{source}}"),
        unit="s",
    )


def _service_panels() -> Iterator[Panel]:
    yield lines(
        "Sources in step",
        "1 while nothing is missing of what a source has said. Which batches are awaited, /api/sources tells.",
        (f"min by (source) (kvscope_source_in_step{{{TARGETS}}})", "{{source}}"),
        good_from=1,
    )
    yield lines(
        "What watching costs, processor seconds per second",
        "Of reading, keeping books and judging, by source, and of the whole service with its pages. What the engine"
        " spends on saying it is not in here.",
        (
            f"sum by (source) (rate(kvscope_source_cpu_seconds_total{{{TARGETS}}}[$__rate_interval]))",
            "{{source}}",
        ),
        (
            f"sum by (instance) (rate(process_cpu_seconds_total{{{TARGETS}}}[$__rate_interval]))",
            "the service, {{instance}}",
        ),
        unit="percentunit",
    )
    yield lines(
        "Memory of the service",
        "Resident memory of kvscope itself. It grows with the pool and with the recent past that is kept, to a bound:"
        " growth alone is not a leak.",
        (f"sum by (instance) (process_resident_memory_bytes{{{TARGETS}}})", "{{instance}}"),
        unit="bytes",
    )
    yield lines(
        "Batches that had to be asked for, per second",
        "Batches that did not come by themselves, by where the engine had them from. Not a loss, but a sign of one to"
        " come. Nothing is drawn where that never happened.",
        (
            f"sum by (supplier) (rate(kvscope_source_batches_filled_total{{{TARGETS}}}[$__rate_interval]))",
            "{{supplier}}",
        ),
        unit=EVENTS_S,
        width=GRID_WIDTH // 2,
    )
    yield lines(
        "Sent by OpenTelemetry, and lost on the way, per second",
        "What arrived at the collector, by signal, and what did not. Nothing is drawn of a service that has none"
        " (--otlp).",
        (
            f"sum by (signal) (rate(kvscope_otlp_sent_total{{{TARGETS}}}[$__rate_interval]))",
            "sent, {{signal}}",
        ),
        (
            f"sum by (signal) (rate(kvscope_otlp_dropped_total{{{TARGETS}}}[$__rate_interval]))",
            "lost, {{signal}}",
        ),
        unit=EVENTS_S,
        width=GRID_WIDTH // 2,
    )
