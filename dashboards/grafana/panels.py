"""How dashboards are made: their panels and queries, and the frame around these: variables, annotations and links.

A query goes through the variables `cluster`, `namespace`, `job` and `instance`, of which Prometheus servers without
Kubernetes know the last two, and through `engine` or `model`. `kvscope` is where the web app is, for links, which lead
to the view that shows the same closer, of the same engine and time range.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    TextBoxVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.heatmap import HeatmapColorOptions, YAxisConfig
from grafana_foundation_sdk.builders.heatmap import Panel as Heatmap
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableOption,
    VariableRefresh,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from kvscope.monitor.questions.availability import families_need

Panel = Stat | Table | TimeSeries | Heatmap
AnyPanel = TypeVar("AnyPanel", Stat, Table, TimeSeries, Heatmap)
PanelQuery = tuple[str, str]
"""An expression, and what its series are called."""

TARGETS: Final = ", ".join(f'{label}=~"${label}"' for label in ("cluster", "namespace", "job", "instance"))
"""Series of the selected targets."""
SELECTED: Final = f'engine=~"$engine", {TARGETS}'
BAD: Final = 'severity=~"warning|error|critical"'
SEVERITY_COLOURS: Final = {"info": "blue", "warning": "yellow", "error": "orange", "critical": "red"}
GRID_WIDTH: Final = 24
HEIGHT: Final = 9
"""Height of all panels but stats: Grafana puts panels in rows, and a row of unequal ones has holes."""
DATA_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
POOL_USAGE: Final = f"max by (engine) (kvscope_pool_usage_ratio{{{SELECTED}}})"
URL_TIME_RANGE: Final = "${__url_time_range}"
TOKENS_S: Final = "suffix: tokens/s"
BLOCKS: Final = "suffix: blocks"
BLOCKS_S: Final = "suffix: blocks/s"
REQUESTS: Final = "suffix: requests"
REQUESTS_S: Final = "reqps"
STEPS_S: Final = "suffix: steps/s"
FINDING_COUNTS: Final = "suffix: findings"
EVENTS_S: Final = "cps"


def _titled(
    panel: AnyPanel, title: str, about: str, width: int, expressions: Iterable[str], height: int = HEIGHT
) -> AnyPanel:
    """Give a panel its frame. One whose figures not every service has says what they need where it has no data."""
    needs = [families_need(re.findall(r"kvscope_\w+", expr)) for expr in expressions]
    if all(needs):
        panel = panel.no_value(needs[0])
    return panel.title(title).description(about).datasource(DATA_SOURCE).height(height).span(width)


def stat(
    title: str,
    about: str,
    *queries: PanelQuery,
    unit: str = "short",
    bad_from: float | None = None,
    good_from: float | None = None,
) -> Stat:
    """Return a panel of current values, red from `bad_from` on, or below `good_from`."""
    panel = (
        _titled(Stat(), title, about, GRID_WIDTH // 4, [expr for expr, _ in queries], 4)
        .unit(unit)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(bad_from, good_from))
    )
    for ref, (expr, legend) in zip("ABCDEF", queries, strict=False):
        panel = panel.with_target(Dataquery().ref_id(ref).expr(expr).instant().legend_format(legend))
    return panel


def lines(
    title: str,
    about: str,
    *queries: PanelQuery,
    unit: str = "short",
    width: int = GRID_WIDTH // 3,
    bad_from: float | None = None,
    good_from: float | None = None,
) -> TimeSeries:
    """Figures over time, with a dashed line where they become bad. A series of an engine leads to that engine."""
    legend = (
        VizLegendOptions()
        .display_mode(LegendDisplayMode.TABLE)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull", "max"])
    )
    panel = _titled(TimeSeries(), title, about, width, [expr for expr, _ in queries])
    panel = panel.min(0).unit(unit).line_width(1).legend(legend)
    if bad_from is not None or good_from is not None:
        style = GraphThresholdsStyleConfig().mode(GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds(_thresholds(bad_from, good_from)).thresholds_style(style)
    if all(SELECTED in expr and "{{engine}}" in name for expr, name in queries):
        url = f"${{kvscope:raw}}/engine?engine=${{__field.labels.engine:percentencode}}&{URL_TIME_RANGE}"
        panel = panel.data_links([DashboardLink("Open in kvscope").url(url).target_blank(True)])
    for ref, (expr, name) in zip("ABCDEF", queries, strict=False):
        query = Dataquery().ref_id(ref).expr(expr).range().legend_format(name)
        panel = panel.with_target(query.exemplar(True) if "histogram_quantile" in expr else query)
    return panel


def heatmap(title: str, about: str, buckets: str, *, counted: str, width: int = GRID_WIDTH // 3) -> Heatmap:
    """Return a panel of how a histogram's buckets fill over time. `counted` is the unit of a cell."""
    target = Dataquery().ref_id("A").expr(buckets).range().format(PromQueryFormat.HEATMAP).legend_format("{{le}}")
    return (
        _titled(Heatmap(), title, about, width, [buckets])
        .calculate(False)
        .color(
            HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .scale(HeatmapColorScale.EXPONENTIAL)
            .exponent(0.5)
            .steps(64)
        )
        .unit(counted)
        .y_axis(YAxisConfig().unit("s"))
        .with_target(target.exemplar(True) if "increase(" in buckets else target)
    )


def _thresholds(bad_from: float | None, good_from: float | None) -> ThresholdsConfig:
    steps = [Threshold(value=None, color="green" if good_from is None else "red")]
    if bad_from is not None:
        steps.append(Threshold(value=bad_from, color="red"))
    if good_from is not None:
        steps.append(Threshold(value=good_from, color="green"))
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def stacked(
    title: str, about: str, *queries: PanelQuery, unit: str = "short", width: int = GRID_WIDTH // 2
) -> TimeSeries:
    """Figures over time that add up."""
    return (
        lines(title, about, *queries, unit=unit, width=width)
        .fill_opacity(70)
        .stacking(StackingConfig().mode(StackingMode.NORMAL))
    )


def with_colours(panel: TimeSeries, colours: Mapping[str, str]) -> TimeSeries:
    """Series of these names have these colours, whatever else is drawn."""
    for name, colour in colours.items():
        fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_name(name, [fixed])
    return panel


def table_panel(title: str, about: str, expr: str, columns: Iterable[str]) -> Table:
    """Return a table of the labels and the current value of each series."""
    order = {column: place for place, column in enumerate((*columns, "Value"))}
    return (
        _titled(Table(), title, about, 2 * GRID_WIDTH // 3, [expr])
        .with_target(Dataquery().ref_id("A").expr(expr).instant().format(PromQueryFormat.TABLE))
        .with_transformation(
            DataTransformerConfig("organize", options={"excludeByName": {"Time": True}, "indexByName": order})
        )
        .no_value("none")
    )


def linked(panel: Table, column: str, title: str, url: str) -> Table:
    """Each cell of the column leads somewhere."""
    links = [{"title": title, "url": url, "targetBlank": True}]
    return panel.override_by_name(column, [DynamicConfigValue("links", links)])


def to_web_app(panel: Table, view: str = "engine") -> Table:
    """Link the engine to a view of it in the web app, at the time of the dashboard."""
    url = f"${{kvscope:raw}}/{view}?engine=${{__value.raw:percentencode}}&{URL_TIME_RANGE}"
    return linked(panel, "engine", "Open in kvscope", url)


# -------------------------------------------------------------------- queries


def rate(counter: str, by: str = "engine", of: str = SELECTED) -> str:
    """Return the rate per second of these series, summed by labels."""
    return f"sum by ({by}) (rate({counter}{{{of}}}[$__rate_interval]))"


def increase(counter: str, by: str = "engine", of: str = SELECTED) -> str:
    """Return how much these series grew in each step of the chart, summed by labels."""
    return f"sum by ({by}) (increase({counter}{{{of}}}[$__rate_interval]))"


def quantile(share: float, histogram: str) -> str:
    """Return a quantile of a histogram over the last five minutes, by engine."""
    return f"histogram_quantile({share}, sum by (engine, le) (rate({histogram}_bucket{{{SELECTED}}}[5m])))"


def in_buckets(histogram: str) -> str:
    """How many fell into each bucket in each step of the chart."""
    return increase(f"{histogram}_bucket", "le")


def now_in_buckets(gauge_histogram: str, more: str = "") -> str:
    """How many are in each bucket of a gauge histogram now."""
    return f"sum by (le) ({gauge_histogram}_bucket{{{SELECTED}{more}}})"


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
