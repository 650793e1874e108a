"""The frame around the panels of a dashboard: its variables, its annotations, and its links.

A query goes through the variables `cluster`, `namespace`, `job` and `instance`, of which Prometheus servers without
Kubernetes know the last two, and through `engine` or `model`. `kvscope` is where the web app is, for links, which lead
to the view that shows the same closer, of the same engine and time range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
)

from kvscope.dashboards.grafana.panels import BAD, DATA_SOURCE, SELECTED, TARGETS, URL_TIME_RANGE, Panel

TARGET_VARIABLES: Final = {"cluster": "Cluster", "namespace": "Namespace", "job": "Job", "instance": "Instance"}
ALL: Final = VariableOption(selected=True, text="All", value="$__all")


def grafana_page(name: str, title: str, summary: str, panels: Iterable[Panel | Row], view: str) -> Dashboard:
    """Return a dashboard about engines that kvscope watches.

    Its annotations mark findings, changes of configuration, and when the figures are not exact. `view` is the web
    app's view that shows the same. The app leads to its overview when several engines are selected.
    """
    dashboard = bare(name, title, summary, "kvscope_engine_info").with_variable(
        _many("engine", "Engine", f"kvscope_engine_info{{{TARGETS}}}", "engine")
    )
    for annotation in (
        _annotation("Findings", "red", f"sum by (engine, code, severity) (kvscope_findings{{{SELECTED}, {BAD}}}) > 0"),
        _annotation(
            "Configuration changes",
            "blue",
            f"kvscope_engine_info{{{SELECTED}}}"
            f" unless present_over_time(kvscope_engine_info{{{SELECTED}}}[10m] offset 1m)",
        ),
        _annotation("Figures inexact", "orange", f"1 - kvscope_ledger_exact{{{SELECTED}}} > 0"),
    ):
        dashboard.annotation(annotation)
    return filled(dashboard.link(web_app_link(f"{view}?engine=${{engine:percentencode}}&{URL_TIME_RANGE}")), panels)


def vllm_dashboard(name: str, title: str, summary: str, panels: Iterable[Panel | Row], selected: str) -> Dashboard:
    """Return a dashboard of a vLLM's own metrics. `selected` matches its series.

    Its annotations mark starts of the engine, and the findings of a kvscope that the same Prometheus scrapes.
    """
    present = "vllm:cache_config_info"
    dashboard = bare(name, title, summary, present).with_variable(
        _many("model", "Model", f"vllm:kv_cache_usage_perc{{{TARGETS}}}", "model_name")
    )
    started = " + ".join(
        f"sum by (namespace, instance, model_name) (resets(vllm:{counter}{{{selected}}}[1m]))"
        for counter in ("prompt_tokens_total", "generation_tokens_total")
    )
    for annotation in (
        _annotation("vLLM restarts", "blue", f"{started} > 0"),
        _annotation(
            "vLLM configuration changes",
            "purple",
            f"{present}{{{TARGETS}}} unless present_over_time({present}{{{TARGETS}}}[10m] offset 1m)",
        ),
        _annotation("Findings of kvscope", "red", f"sum by (engine, code, severity) (kvscope_findings{{{BAD}}}) > 0"),
    ):
        dashboard.annotation(annotation)
    return filled(dashboard.link(web_app_link(f"?{URL_TIME_RANGE}")), panels)


def bare(name: str, title: str, summary: str, present: str) -> Dashboard:
    """Return a dashboard without panels, linked to the others. `present` is a metric of each of its targets."""
    dashboard = (
        Dashboard(title)
        .uid(f"kvscope-{name}")
        .description(summary)
        .tags(["kvscope", "llm"])
        .editable()
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            DashboardLink("kvscope")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["kvscope"])
            .include_vars(True)
            .keep_time(True)
        )
    )
    wider: list[str] = []
    for label, words in TARGET_VARIABLES.items():
        matchers = ", ".join(f'{each}=~"${each}"' for each in wider)
        dashboard.with_variable(_many(label, words, f"{present}{{{matchers}}}" if wider else present, label))
        wider.append(label)
    return dashboard.with_variable(TextBoxVariable("kvscope").label("Web app").default_value("http://127.0.0.1:8765"))


def filled(dashboard: Dashboard, panels: Iterable[Panel | Row]) -> Dashboard:
    """Add rows and panels in their order."""
    for panel in panels:
        if isinstance(panel, Row):
            dashboard.with_row(panel)
        else:
            dashboard.with_panel(panel)
    return dashboard


def web_app_link(path: str) -> DashboardLink:
    """Return the link of a dashboard to the web app."""
    return (
        DashboardLink("Open kvscope: blocks, requests and their history")
        .type(DashboardLinkType.LINK)
        .icon("external link")
        .url(f"${{kvscope:raw}}/{path}")
        .target_blank(True)
    )


def _many(name: str, words: str, series: str, label: str) -> QueryVariable:
    """Return a variable of a label's values, all of them at first. `.*` also matches series without the label."""
    return (
        QueryVariable(name)
        .label(words)
        .datasource(DATA_SOURCE)
        .query(f"label_values({series}, {label})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(ALL)
    )


def _annotation(name: str, colour: str, expr: str) -> AnnotationQuery:
    return AnnotationQuery().name(name).datasource(DATA_SOURCE).enable(True).icon_color(colour).expr(expr)
