"""All engines: which one needs a look."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from kvscope.dashboards.grafana import panels
from kvscope.dashboards.grafana.dashboard_frame import grafana_page
from kvscope.dashboards.grafana.panels import (
    BAD,
    GRID_WIDTH,
    REQUESTS,
    SELECTED,
    TOKENS_S,
    Panel,
    PanelQuery,
    heatmap,
    lines,
    now_in_buckets,
    row_heading,
    stat,
    table_panel,
    to_web_app,
)


def fleet_page() -> Dashboard:
    """The overview."""
    return grafana_page("fleet", "kvscope / Fleet", "All engines: which one needs a look.", _fleet_panels(), view="")


def _fleet_panels() -> Iterator[Panel | Row]:
    yield row_heading("Now")
    yield from _fleet_summary_panels()
    yield row_heading("Findings")
    yield from _fleet_finding_panels()
    yield row_heading("Engines")
    yield from _fleet_engine_panels()
    yield row_heading("Waiting requests")
    yield heatmap(
        "Waiting requests by age, all engines",
        "How many requests have waited for how long, at each moment: a band that climbs is a queue that does not move."
        " It does not tell them apart by engine or by reason.",
        now_in_buckets("kvscope_request_waiting_seconds"),
        counted=REQUESTS,
        width=GRID_WIDTH,
    )


def _fleet_summary_panels() -> Iterator[Panel]:
    yield stat(
        "Findings, warning or worse",
        "Troubles that fire now, each past its own grace, over all engines. 0 means that kvscope sees none, not that"
        " there is none: it knows the classes of its catalogue, and only while the ledgers are exact.",
        (
            f"sum(kvscope_findings{{{SELECTED}, {BAD}}}) or 0 * count(kvscope_ledger_exact{{{SELECTED}}})",
            "",
        ),
        bad_from=1,
    )
    yield stat(
        "Engines heard",
        "Engines that have said something in the last 15 s. It cannot tell a dead engine from a broken stream.",
        (f"sum(time() - kvscope_engine_last_heard_timestamp_seconds{{{SELECTED}}} < bool 15)", ""),
    )
    yield stat(
        "Fullest pool",
        "The largest share of a pool in use. High is what a pool is for; whether it is trouble is not told here:"
        " queue and findings tell.",
        (f"max({panels.POOL_USAGE})", ""),
        unit="percentunit",
    )
    yield stat(
        "Engines with inexact figures",
        "Ledgers that have lost events and await the engine's next whole audit. What happened in between is not known"
        " afterwards either.",
        (f"count(kvscope_ledger_exact{{{SELECTED}}}) - sum(kvscope_ledger_exact{{{SELECTED}}})", ""),
        bad_from=1,
    )


def _fleet_finding_panels() -> Iterator[Panel]:
    yield to_web_app(
        table_panel(
            "Engines with findings",
            "How many findings each engine has, by severity. What they are is not told here: the page of findings does;"
            " whom to blame, the web app, where the engine's name leads.",
            f"sort_desc(sum by (engine, severity) (kvscope_findings{{{SELECTED}}}))",
            ("engine", "severity"),
        )
    )
    yield lines(
        "Findings by engine",
        "How many fire, information left out. One trouble counts once however many requests it has, so the number"
        " does not tell how bad it is.",
        (f"sum by (engine) (kvscope_findings{{{SELECTED}, {BAD}}})", "{{engine}}"),
    )


def _fleet_engine_panels() -> Iterator[Panel]:
    over_engines: dict[str, tuple[str, str, PanelQuery]] = {
        "Pool in use": (
            "Blocks in use as a share of those that can be: what vLLM calls KV cache usage. It cannot tell use from"
            " leak.",
            "percentunit",
            (panels.POOL_USAGE, "{{engine}}"),
        ),
        "Requests waiting": (
            "Requests in any waiting state. Why they wait is not told here: the page of requests does.",
            REQUESTS,
            (f'sum by (engine) (kvscope_requests{{{SELECTED}, state=~"WAITING.*|PREEMPTED"}})', "{{engine}}"),
        ),
        "Tokens generated per second": (
            "Output only. It does not tell how many of them a client was still waiting for.",
            TOKENS_S,
            (panels.rate("kvscope_output_tokens_total"), "{{engine}}"),
        ),
    }
    for title, (says, unit, query) in over_engines.items():
        yield lines(title, says, query, unit=unit)
