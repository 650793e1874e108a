"""All engines: which one needs a look."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from . import panels
from .panels import BAD, FINDING_COUNTS, GRID_WIDTH, REQUESTS, SELECTED, TOKENS_S, Panel, PanelQuery


def fleet_page() -> Dashboard:
    """Return the overview of all engines."""
    return panels.grafana_page(
        "fleet", "kvscope / Fleet", "All engines: which one needs attention.", _panels(), view=""
    )


def _panels() -> Iterator[Panel | Row]:
    yield Row("Now")
    yield from _summary_panels()
    yield Row("Findings")
    yield from _finding_panels()
    yield Row("Engines")
    yield from _engine_panels()
    yield Row("Waiting requests")
    yield panels.heatmap(
        "Waiting requests by age, all engines",
        "Waiting requests by waiting time: a climbing band is a queue that does not move. It does not separate"
        " engines or reasons.",
        panels.now_in_buckets("kvscope_request_waiting_seconds"),
        counted=REQUESTS,
        width=GRID_WIDTH,
    )


def _summary_panels() -> Iterator[Panel]:
    yield panels.stat(
        "Findings, warning or worse",
        "Findings that fire now on all engines, each past its pending period. 0 means that kvscope detects none,"
        " not that none exists: it knows the codes of its catalogue, and only while the ledgers are exact.",
        (
            f"sum(kvscope_findings{{{SELECTED}, {BAD}}}) or 0 * count(kvscope_engine_info{{{SELECTED}}})",
            "",
        ),
        bad_from=1,
    )
    yield panels.stat(
        "Engines received",
        "Engines that sent an event in the last 15 s. It does not distinguish a dead engine from a broken stream.",
        (f"sum(time() - kvscope_engine_last_heard_timestamp_seconds{{{SELECTED}}} < bool 15)", ""),
    )
    yield panels.stat(
        "Fullest pool",
        "The highest pool usage. A full pool is not a problem by itself: the queue and the findings show one.",
        (f"max({panels.POOL_USAGE})", ""),
        unit="percentunit",
    )
    yield panels.stat(
        "Engines with inexact figures",
        "Ledgers that lost events and wait for the engine's next complete audit. The audit does not recover the"
        " events in between.",
        (f"count(kvscope_ledger_exact{{{SELECTED}}}) - sum(kvscope_ledger_exact{{{SELECTED}}})", ""),
        bad_from=1,
    )


def _finding_panels() -> Iterator[Panel]:
    yield panels.to_web_app(
        panels.table_panel(
            "Engines with findings",
            "Findings per engine by severity, not by code: the findings page lists those, and the engine's name"
            " links to the web app with the culprits.",
            f"sort_desc(sum by (engine, severity) (kvscope_findings{{{SELECTED}}}))",
            ("engine", "severity"),
        )
    )
    yield panels.lines(
        "Findings by engine",
        "The number of firing findings above information. One cause counts once for any number of requests, so the"
        " number does not show the harm.",
        (f"sum by (engine) (kvscope_findings{{{SELECTED}, {BAD}}})", "{{engine}}"),
        unit=FINDING_COUNTS,
    )


def _engine_panels() -> Iterator[Panel]:
    over_engines: dict[str, tuple[str, str, PanelQuery]] = {
        "Pool in use": (
            "Used blocks as a share of usable blocks, which vLLM calls KV cache usage. It does not distinguish load"
            " from a leak.",
            "percentunit",
            (panels.POOL_USAGE, "{{engine}}"),
        ),
        "Requests waiting": (
            "Requests in any waiting state, not by reason: the requests page shows why they wait.",
            REQUESTS,
            (f'sum by (engine) (kvscope_requests{{{SELECTED}, state=~"WAITING.*|PREEMPTED"}})', "{{engine}}"),
        ),
        "Tokens generated per second": (
            "Output only. It does not show how many of them a client still waited for.",
            TOKENS_S,
            (panels.rate("kvscope_output_tokens_total"), "{{engine}}"),
        ),
    }
    for title, (about, unit, query) in over_engines.items():
        panel = panels.lines(title, about, query, unit=unit)
        yield panel.max(1) if unit == "percentunit" else panel
