"""How a page and a panel are made. A query of kvscope's metrics goes through the variable `engine`; `kvscope` is where
the web app is, for links, which lead to the view that shows the same closer, of the same engine and time range.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    TextBoxVariable,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = Stat | Table | TimeSeries
PanelQuery = tuple[str, str]
"""An expression, and what its series are called."""

SELECTED: Final = 'engine=~"$engine"'
BAD: Final = 'severity=~"warning|error|critical"'
SEVERITY_COLOURS: Final = {"info": "blue", "warning": "yellow", "error": "orange", "critical": "red"}
GRID_WIDTH: Final = 24
HEIGHT: Final = 9
"""Of all but figures: Grafana puts panels in rows, and a row of unequal ones has holes."""
DATA_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
POOL_USAGE: Final = (
    f'1 - sum by (engine) (kvscope_blocks{{{SELECTED}, holder=~"free|cached_idle"}})'
    f' / sum by (engine) (kvscope_blocks{{{SELECTED}, holder!="reserved"}})'
)
_RANGE: Final = "${__url_time_range}"


def grafana_page(name: str, title: str, says: str, panels: Iterable[Panel], view: str) -> Dashboard:
    """A page about engines that kvscope watches; on its time axis are findings, changes of configuration, and when its
    figures are not sure. `view`: which of the web app's views shows the same.
    """
    dashboard = (
        bare(name, title, says)
        .with_variable(
            QueryVariable("engine")
            .label("Engine")
            .datasource(DATA_SOURCE)
            .query("label_values(kvscope_blocks, engine)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        .with_variable(TextBoxVariable("kvscope").label("Web app").default_value("http://127.0.0.1:8765"))
        .annotation(
            AnnotationQuery()
            .name("Findings")
            .datasource(DATA_SOURCE)
            .enable(True)
            .icon_color("red")
            .expr(f"sum by (engine, code, severity) (kvscope_findings{{{SELECTED}, {BAD}}}) > 0")
        )
        .annotation(
            AnnotationQuery()
            .name("Configuration changes")
            .datasource(DATA_SOURCE)
            .enable(True)
            .icon_color("blue")
            .expr(
                f"kvscope_engine_info{{{SELECTED}}}"
                f" unless present_over_time(kvscope_engine_info{{{SELECTED}}}[10m] offset 1m)"
            )
        )
        .annotation(
            AnnotationQuery()
            .name("Figures inexact")
            .datasource(DATA_SOURCE)
            .enable(True)
            .icon_color("orange")
            .expr(f"1 - kvscope_ledger_exact{{{SELECTED}}} > 0")
        )
        .link(
            DashboardLink("Open kvscope: blocks, requests and their stories")
            .type(DashboardLinkType.LINK)
            .icon("external link")
            .url(f"${{kvscope:raw}}/{view}?engine=${{engine:percentencode}}&{_RANGE}")
            .target_blank(True)
        )
    )
    for panel in panels:
        dashboard.with_panel(panel)
    return dashboard


def bare(name: str, title: str, says: str) -> Dashboard:
    """A page with links to the others, and nothing that is kvscope's own."""
    return (
        Dashboard(title)
        .uid(f"kvscope-{name}")
        .description(says)
        .tags(["kvscope", "llm"])
        .readonly()
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


# -------------------------------------------------------------------- panels


def stat(
    title: str,
    says: str,
    *queries: PanelQuery,
    unit: str = "short",
    bad_from: float | None = None,
    good_from: float | None = None,
) -> Stat:
    """Figures of now; red from `bad_from` on, or below `good_from`."""
    steps = [Threshold(value=None, color="green" if good_from is None else "red")]
    if bad_from is not None:
        steps.append(Threshold(value=bad_from, color="red"))
    if good_from is not None:
        steps.append(Threshold(value=good_from, color="green"))
    panel = (
        Stat()
        .title(title)
        .description(says)
        .datasource(DATA_SOURCE)
        .height(4)
        .span(GRID_WIDTH // 4)
        .unit(unit)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
    )
    for ref, (expr, legend) in zip("ABCDEF", queries, strict=False):
        panel = panel.with_target(Dataquery().ref_id(ref).expr(expr).instant().legend_format(legend))
    return panel


def lines(title: str, says: str, *queries: PanelQuery, unit: str = "short", width: int = GRID_WIDTH // 3) -> TimeSeries:
    """Figures over time."""
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    panel = (
        TimeSeries()
        .title(title)
        .description(says)
        .datasource(DATA_SOURCE)
        .height(HEIGHT)
        .span(width)
        .min(0)
        .unit(unit)
        .line_width(1)
        .legend(legend)
    )
    for ref, (expr, name) in zip("ABCDEF", queries, strict=False):
        panel = panel.with_target(Dataquery().ref_id(ref).expr(expr).range().legend_format(name))
    return panel


def stacked(
    title: str, says: str, *queries: PanelQuery, unit: str = "short", width: int = GRID_WIDTH // 2
) -> TimeSeries:
    """Figures over time that add up."""
    return (
        lines(title, says, *queries, unit=unit, width=width)
        .fill_opacity(70)
        .stacking(StackingConfig().mode(StackingMode.NORMAL))
    )


def with_colours(panel: TimeSeries, colours: Mapping[str, str]) -> TimeSeries:
    """Series of these names have these colours, whatever else is drawn."""
    for name, colour in colours.items():
        fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_name(name, [fixed])
    return panel


def table_panel(title: str, says: str, expr: str, columns: Iterable[str]) -> Table:
    """The labels and the value of each series of now."""
    order = {column: place for place, column in enumerate((*columns, "Value"))}
    return (
        Table()
        .title(title)
        .description(says)
        .datasource(DATA_SOURCE)
        .height(HEIGHT)
        .span(2 * GRID_WIDTH // 3)
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
    """The engine leads to a view of it in the web app, at the time that is looked at."""
    url = f"${{kvscope:raw}}/{view}?engine=${{__value.raw:percentencode}}&{_RANGE}"
    return linked(panel, "engine", "Open in kvscope", url)


# -------------------------------------------------------------------- queries


def rate(counter: str, by: str = "engine", more: str = "") -> str:
    """A second, summed by these labels."""
    return f"sum by ({by}) (rate({counter}{{{SELECTED}{more}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, more: str = "") -> str:
    """Of what a histogram took in over the last five minutes, by engine."""
    return f"histogram_quantile({share}, sum by (engine, le) (rate({histogram}_bucket{{{SELECTED}{more}}}[5m])))"
