"""All engines: which one needs a look."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard

from kvscope.dashboards.grafana import panels
from kvscope.dashboards.grafana.panels import BAD, HERE, Panel, Query, lines, stat, table, to_web_app


def page() -> Dashboard:
    """The overview."""
    return panels.page("fleet", "kvscope / Fleet", "All engines: which one needs a look.", _panels(), view="")


def _panels() -> Iterator[Panel]:
    yield stat(
        "Findings, warning or worse",
        "Troubles that fire now, each past its own grace, over all engines. 0 means that kvscope sees none, not that"
        " there is none: it knows the classes of its catalogue, and only while the ledgers are exact.",
        (f"sum(kvscope_findings{{{HERE}, {BAD}}}) or 0 * count(kvscope_ledger_exact{{{HERE}}})", ""),
        bad_from=1,
    )
    yield stat(
        "Engines heard",
        "Engines that have said something in the last 15 s. It cannot tell a dead engine from a broken stream.",
        (f"sum(time() - kvscope_engine_last_heard_timestamp_seconds{{{HERE}}} < bool 15)", ""),
    )
    yield stat(
        "Fullest pool",
        "The largest share of a pool in use. High is what a pool is for; whether it is trouble is not told here:"
        " queue and findings tell.",
        (f"max({panels.USAGE})", ""),
        unit="percentunit",
    )
    yield stat(
        "Engines with inexact figures",
        "Ledgers that have lost events and await the engine's next whole audit. What happened in between is not known"
        " afterwards either.",
        (f"count(kvscope_ledger_exact{{{HERE}}}) - sum(kvscope_ledger_exact{{{HERE}}})", ""),
        bad_from=1,
    )
    yield to_web_app(
        table(
            "Engines with findings",
            "How many findings each engine has, by severity. What they are is not told here: the page of findings does;"
            " whom to blame, the web app, where the engine's name leads.",
            f"sort_desc(sum by (engine, severity) (kvscope_findings{{{HERE}}}))",
            ("engine", "severity"),
        )
    )
    yield lines(
        "Findings by engine",
        "How many fire, information left out. One trouble counts once however many requests it has, so the number"
        " does not tell how bad it is.",
        (f"sum by (engine) (kvscope_findings{{{HERE}, {BAD}}})", "{{engine}}"),
    )
    over_engines: dict[str, tuple[str, str, Query]] = {
        "Pool in use": (
            "Blocks in use as a share of those that can be: what vLLM calls KV cache usage. It cannot tell use from"
            " leak.",
            "percentunit",
            (panels.USAGE, "{{engine}}"),
        ),
        "Requests waiting": (
            "Requests in any waiting state. Why they wait is not told here: the page of requests does.",
            "short",
            (f'sum by (engine) (kvscope_requests{{{HERE}, state=~"WAITING.*|PREEMPTED"}})', "{{engine}}"),
        ),
        "Tokens generated per second": (
            "Output only. It does not tell how many of them a client was still waiting for.",
            "short",
            (panels.rate("kvscope_output_tokens_total"), "{{engine}}"),
        ),
    }
    for title, (says, unit, query) in over_engines.items():
        yield lines(title, says, query, unit=unit)
