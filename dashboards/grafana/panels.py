"""How panels and queries of dashboards are made. dashboard_frame.py has the variables that queries go through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from grafana_foundation_sdk.builders.common import (
    GraphThresholdsStyleConfig,
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
)
from grafana_foundation_sdk.builders.dashboard import DashboardLink, Row, ThresholdsConfig
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
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode, HeatmapColorScale
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel = Stat | Table | TimeSeries | Heatmap
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
POOL_USAGE: Final = (
    f'1 - sum by (engine) (kvscope_blocks{{{SELECTED}, holder=~"free|cached_idle"}})'
    f' / sum by (engine) (kvscope_blocks{{{SELECTED}, holder!="reserved"}})'
)
URL_TIME_RANGE: Final = "${__url_time_range}"
TOKENS_S: Final = "suffix: tokens/s"
BLOCKS: Final = "suffix: blocks"
BLOCKS_S: Final = "suffix: blocks/s"
REQUESTS: Final = "suffix: requests"
REQUESTS_S: Final = "reqps"
STEPS_S: Final = "suffix: steps/s"
FINDING_COUNTS: Final = "suffix: findings"
EVENTS_S: Final = "cps"


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
        Stat()
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .height(4)
        .span(GRID_WIDTH // 4)
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
    panel = (
        TimeSeries()
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .height(HEIGHT)
        .span(width)
        .min(0)
        .unit(unit)
        .line_width(1)
        .legend(legend)
    )
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
        Heatmap()
        .title(title)
        .description(about)
        .datasource(DATA_SOURCE)
        .height(HEIGHT)
        .span(width)
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


def row_heading(title: str) -> Row:
    """Return the heading of the panels that follow."""
    return Row(title)


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
        Table()
        .title(title)
        .description(about)
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
    """Link the engine to a view of it in the web app, at the time of the dashboard."""
    url = f"${{kvscope:raw}}/{view}?engine=${{__value.raw:percentencode}}&{URL_TIME_RANGE}"
    return linked(panel, "engine", "Open in kvscope", url)


# -------------------------------------------------------------------- queries


def rate(counter: str, by: str = "engine", more: str = "") -> str:
    """Return the rate per second, summed by these labels."""
    return f"sum by ({by}) (rate({counter}{{{SELECTED}{more}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, more: str = "") -> str:
    """Return a quantile of a histogram over the last five minutes, by engine."""
    return f"histogram_quantile({share}, sum by (engine, le) (rate({histogram}_bucket{{{SELECTED}{more}}}[5m])))"


def in_buckets(histogram: str, more: str = "") -> str:
    """How many fell into each bucket in each step of the chart."""
    return f"sum by (le) (increase({histogram}_bucket{{{SELECTED}{more}}}[$__rate_interval]))"


def now_in_buckets(gauge_histogram: str, more: str = "") -> str:
    """How many are in each bucket of a gauge histogram now."""
    return f"sum by (le) ({gauge_histogram}_bucket{{{SELECTED}{more}}})"
