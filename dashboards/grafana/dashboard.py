"""The dashboard "kvscope": who holds the KV memory, what waits for it, what is wrong, and how far to trust all that.

Built with the Grafana Foundation SDK for the Grafana that docker-compose.yml pins. Every query is on metrics of
monitor.outlets.prometheus and goes through the variable `engine`; `kvscope` is where the web app is, for links.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders.common import ReduceDataOptions, StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    TextBoxVariable,
    ThresholdsConfig,
)  # fmt: skip
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.stat import Panel as Stat
from grafana_foundation_sdk.builders.table import Panel as Table
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
)  # fmt: skip
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)  # fmt: skip
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

GENERATED: Final = Path(__file__).parent / "generated" / "kvscope.json"
HERE: Final = 'engine=~"$engine"'
WIDTH: Final = 24
HOLDER_COLOURS: Final = {
    "running": "green",
    "waiting": "yellow",
    "finished": "orange",
    "cached_idle": "blue",
    "free": "#4d5866",
    "reserved": "#8e8e8e",
    "unaccounted": "red",
}
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")


def as_json() -> str:
    """The dashboard as Grafana reads it, the same for the same code."""
    return json.dumps(_dashboard().build(), cls=JSONEncoder, sort_keys=True, indent=2) + "\n"


def _dashboard() -> Dashboard:
    dashboard = (
        Dashboard("kvscope")
        .uid("kvscope")
        .description("The KV memory of paged-attention engines: who holds it, what waits for it, and what is wrong.")
        .tags(["kvscope", "llm"])
        .readonly()
        .time("now-30m", "now")
        .refresh("10s")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("engine")
            .label("Engine")
            .datasource(_SOURCE)
            .query("label_values(kvscope_blocks, engine)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
        .with_variable(TextBoxVariable("kvscope").label("Web app").default_value("http://127.0.0.1:8765"))
        .link(
            DashboardLink("Open kvscope: blocks, requests and their stories")
            .type(DashboardLinkType.LINK)
            .icon("external link")
            .url("${kvscope:raw}")
            .target_blank(True)
        )
    )
    for panel in (*_glance(), _balance(), _queue(), _usage(), _findings(), _tokens(), _preemptions(), *_trust()):
        dashboard.with_panel(panel)
    return dashboard


# -------------------------------------------------------------------- at a glance


def _glance() -> Iterable[Stat]:
    yield (
        _stat("Findings, warning or worse")
        .thresholds(_bad_from(1))
        .description(
            "Troubles that are firing now, each past its own grace. 0 means that kvscope sees none, not that there is"
            " none: it knows the classes of its catalogue, and only while the ledger is exact. No data: no engine is"
            " being followed."
        )
        .with_target(
            _now(
                f'sum(kvscope_findings{{{HERE}, severity=~"warning|error|critical"}})'
                f" or 0 * count(kvscope_ledger_exact{{{HERE}}})"
            )
        )
    )
    yield (
        _stat("Pool in use")
        .thresholds(_bad_from(0.95, "yellow"))
        .unit("percentunit")
        .description(
            "Blocks in use as a share of those that can be, as the engine counts it: cached blocks that no request"
            " uses are free. High is what a pool is for; whether it is trouble, the queue beside it tells."
        )
        .with_target(_now(_USAGE, "{{engine}}"))
    )
    yield (
        _stat("UNACCOUNTED")
        .thresholds(_bad_from(1))
        .description(
            "Blocks in use that nobody legitimately holds, and references that no living request and no announced"
            " deferral explains. Anything but 0 is a leak or a broken account; which blocks they are, the web app"
            " tells. For a moment after a loss of events it may be wrong: look at Ledger."
        )
        .with_target(_now(f'sum by (engine) (kvscope_blocks{{{HERE}, holder="unaccounted"}})', "blocks, {{engine}}"))
        .with_target(_now(f"sum by (engine) (kvscope_unexplained_references{{{HERE}}})", "references, {{engine}}", "B"))
    )
    exact, not_exact = ValueMappingResult("exact", "green"), ValueMappingResult("NOT EXACT", "red")
    yield (
        _stat("Ledger")
        .mappings([ValueMap({"1": exact, "0": not_exact})])
        .description(
            "Whether every figure here rests on the whole stream of events. NOT EXACT from a loss of events until the"
            " engine's next complete audit; what happened in between is not known afterwards either."
        )
        .with_target(_now(f"min by (engine) (kvscope_ledger_exact{{{HERE}}})", "{{engine}}"))
    )


# -------------------------------------------------------------------- memory and queue

_USAGE: Final = (
    f'1 - sum by (engine) (kvscope_blocks{{{HERE}, holder=~"free|cached_idle"}})'
    f' / sum by (engine) (kvscope_blocks{{{HERE}, holder!="reserved"}})'
)


def _balance() -> TimeSeries:
    panel = (
        _stacked("Balance of the pool, by holder", WIDTH // 2)
        .unit("short")
        .description(
            "Every block of the pool, counted once, under the liveliest that holds it; the bands add up to the pool"
            " (but for the moments in which the ledger is not exact)."
            " finished: kept after its request's end by a deferral that was announced. cached_idle: content that a"
            " later request may reuse, free to be taken. It does not tell which request holds which block: the web"
            " app does."
        )
        .with_target(_over_time(f"sum by (holder) (kvscope_blocks{{{HERE}}})", "{{holder}}"))
    )
    for holder, colour in HOLDER_COLOURS.items():
        fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
        panel = panel.override_by_name(holder, [fixed])
    return panel


def _queue() -> TimeSeries:
    return (
        _stacked("Requests, by state and reason", WIDTH // 2)
        .description(
            "Requests in each state, and the one reason why they are in it. Finished ones count only while they hold"
            " blocks. BEHIND_HEAD: stands behind a request that does not fit. Requests that come and go between two"
            " scrapes are not seen here, and how long one has waited is not told: the web app does."
        )
        .with_target(_over_time(f"sum by (state, reason) (kvscope_requests{{{HERE}}})", "{{state}} {{reason}}"))
    )


def _usage() -> TimeSeries:
    return (
        _lines("Pool in use", WIDTH // 3)
        .unit("percentunit")
        .min(0)
        .max(1)
        .description(
            "Blocks in use as a share of those that can be, by engine: what vLLM calls KV cache usage. It cannot tell"
            " use from leak: the balance by holder does."
        )
        .with_target(_over_time(_USAGE, "{{engine}}"))
    )


# -------------------------------------------------------------------- findings


def _findings() -> Table:
    runbook = DynamicConfigValue(
        "links",
        [{"title": "Runbook", "url": "${kvscope:raw}/docs/runbooks/${__value.raw}.md", "targetBlank": True}],
    )
    hidden = {"Time": True}
    order = {"severity": 0, "code": 1, "verdict": 2, "engine": 3, "Value": 4}
    return (
        Table()
        .title("Findings that are firing")
        .datasource(_SOURCE)
        .height(8)
        .span(2 * WIDTH // 3)
        .description(
            "What is wrong now, by class, with how kvscope knows: confirmed by the stream, or likely. The code leads"
            " to its runbook. Who is to blame, the evidence and what to do are not here: open kvscope, or run"
            " `monitor doctor`."
        )
        .with_target(
            _now(f"sum by (engine, code, severity, verdict) (kvscope_findings{{{HERE}}})").format(PromQueryFormat.TABLE)
        )
        .with_transformation(
            DataTransformerConfig("organize", options={"excludeByName": hidden, "indexByName": order})
        )
        .override_by_name("code", [runbook])
        .no_value("none")
    )


# -------------------------------------------------------------------- work


def _tokens() -> TimeSeries:
    return (
        _lines("Tokens per second", WIDTH // 4)
        .description(
            "Tokens generated, and tokens computed: prompts, output, and what preemption made the engine compute"
            " again. It does not tell how many of them a client was still waiting for."
        )
        .with_target(_over_time(f"sum by (engine) ({_rate('kvscope_output_tokens_total')})", "generated, {{engine}}"))
        .with_target(
            _over_time(f"sum by (engine) ({_rate('kvscope_computed_tokens_total')})", "computed, {{engine}}", "B")
        )
    )


def _preemptions() -> TimeSeries:
    return (
        _lines("Preemptions and allocations that failed, per second", WIDTH // 4)
        .description(
            "Running requests that lost their blocks, by reason, and allocations that did not get theirs. A"
            " preemption costs the computed tokens of its victim; for whom it was preempted, the request's story"
            " tells."
        )
        .with_target(_over_time(f"sum by (reason) ({_rate('kvscope_preemptions_total')})", "preempted, {{reason}}"))
        .with_target(_over_time(f"sum({_rate('kvscope_allocation_failures_total')})", "allocation failed", "B"))
    )


# -------------------------------------------------------------------- how far to trust it


def _trust() -> Iterable[TimeSeries]:
    yield (
        _lines("Lost of the event stream", WIDTH // 4)
        .description(
            "Batches of events that nobody could supply, by the stage that lost them, and events that the engine's"
            " own buffer dropped. Any loss makes the figures inexact until the next complete audit. What a loss hid"
            " is not known; with a journal (--journal) only the engine's buffer can lose any."
        )
        .with_target(
            _over_time(
                f"sum by (stage) (increase(kvscope_stream_batches_lost_total{{{HERE}}}[$__rate_interval]))",
                "batches, {{stage}}",
            )
        )
        .with_target(
            _over_time(
                f"sum(increase(kvscope_stream_events_dropped_total{{{HERE}}}[$__rate_interval]))", "events, engine", "B"
            )
        )
    )
    yield (
        _lines("Since an engine was last heard", WIDTH // 4)
        .unit("s")
        .description(
            "Seconds since the engine last said anything; an idle one says a heartbeat a second. Silence alone does"
            " not tell a dead engine from a broken stream, or from a Prometheus that cannot reach kvscope."
        )
        .with_target(_over_time(f"time() - kvscope_engine_last_heard_timestamp_seconds{{{HERE}}}", "{{engine}}"))
    )


# -------------------------------------------------------------------- how panels are made


def _stat(title: str) -> Stat:
    return (
        Stat()
        .title(title)
        .datasource(_SOURCE)
        .height(4)
        .span(WIDTH // 4)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.VALUE)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
    )


def _bad_from(value: float, colour: str = "red") -> ThresholdsConfig:
    steps = [Threshold(value=None, color="green"), Threshold(value=value, color=colour)]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _lines(title: str, width: int) -> TimeSeries:
    legend = (
        VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    )
    return TimeSeries().title(title).datasource(_SOURCE).height(8).span(width).min(0).line_width(1).legend(legend)


def _stacked(title: str, width: int) -> TimeSeries:
    return _lines(title, width).height(10).fill_opacity(70).stacking(StackingConfig().mode(StackingMode.NORMAL))


def _rate(counter: str) -> str:
    return f"rate({counter}{{{HERE}}}[$__rate_interval])"


def _now(expr: str, legend: str = "", ref: str = "A") -> Dataquery:
    return Dataquery().ref_id(ref).expr(expr).instant().legend_format(legend)


def _over_time(expr: str, legend: str, ref: str = "A") -> Dataquery:
    return Dataquery().ref_id(ref).expr(expr).range().legend_format(legend)
