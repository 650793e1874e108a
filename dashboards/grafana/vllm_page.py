"""A plain vLLM, by its own metrics: no kvscope needed. Names as of vLLM 0.20 and later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable
from grafana_foundation_sdk.models.dashboard import VariableRefresh

from kvscope.dashboards.grafana import panels
from kvscope.dashboards.grafana.panels import DATA_SOURCE, GRID_WIDTH, Panel, lines, stacked, stat

MODEL: Final = 'model_name=~"$model"'


def vllm_page() -> Dashboard:
    """The page."""
    dashboard = panels.bare(
        "vllm", "kvscope / A plain vLLM", "vLLM's own metrics, and what they cannot tell."
    ).with_variable(
        QueryVariable("model")
        .label("Model")
        .datasource(DATA_SOURCE)
        .query("label_values(vllm:kv_cache_usage_perc, model_name)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )
    for panel in _vllm_panels():
        dashboard.with_panel(panel)
    return dashboard


def _vllm_panels() -> Iterator[Panel]:
    yield from _vllm_state_panels()
    yield from _vllm_work_panels()


def _vllm_state_panels() -> Iterator[Panel]:
    name = "{{model_name}}/{{engine}}"
    yield stat(
        "KV cache usage",
        "The share of blocks in use. Which requests hold them, whether they live, and why, vLLM does not expose: a leak"
        " looks like load.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", name),
        unit="percentunit",
    )
    yield stat(
        "In use with nothing running",
        "The share of blocks in use while no request runs or waits. Anything but 0 that stays is held by requests that"
        " are over; no data is as it should be.",
        (
            f"vllm:kv_cache_usage_perc{{{MODEL}}}"
            " and vllm:num_requests_running == 0 and vllm:num_requests_waiting == 0",
            name,
        ),
        unit="percentunit",
        bad_from=0.01,
    )
    yield stat(
        "Running",
        "Requests that the scheduler has running. One that is given no token at any step counts too.",
        (f"vllm:num_requests_running{{{MODEL}}}", name),
    )
    yield stat(
        "Waiting",
        "Requests that the scheduler has waiting. Those that never reached it are not in it.",
        (f"vllm:num_requests_waiting{{{MODEL}}}", name),
    )
    yield lines(
        "KV cache usage over time",
        "Usage that never comes back to 0 between loads is a leak or a pinned session, and vLLM does not tell which.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", name),
        unit="percentunit",
        width=GRID_WIDTH // 2,
    )
    yield stacked(
        "Requests running and waiting",
        "Waiting by reason: capacity (no room), deferred (waits for KV, a grammar or the like). For how long each has"
        " waited is not exposed before it ends.",
        (f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
        (f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{MODEL}}})", "waiting, {{reason}}"),
    )


def _vllm_work_panels() -> Iterator[Panel]:
    name = "{{model_name}}/{{engine}}"
    yield lines(
        "Preemptions per second",
        "vLLM counts a preemption only with the victim's next token: a request that is preempted for ever is never"
        " counted.",
        (_vllm_rate("num_preemptions_total"), name),
    )
    yield lines(
        "vLLM's tokens per second",
        "Prompt tokens and tokens generated. What is computed again after a preemption is not told apart.",
        (_vllm_rate("prompt_tokens_total"), f"prompt, {name}"),
        (_vllm_rate("generation_tokens_total"), f"generated, {name}"),
    )
    yield lines(
        "vLLM's prefix cache hits",
        "Share of the tokens looked up that the cache had. Whether what is missing was evicted or never there is not"
        " exposed.",
        (f"{_vllm_rate('prefix_cache_hits_total')} / {_vllm_rate('prefix_cache_queries_total')}", name),
        unit="percentunit",
    )
    yield lines(
        "Requests that ended, per second",
        "By reason. Requests that a client aborted are not counted by vLLM: what the front end drops leaves no trace"
        " here.",
        (
            f"sum by (finished_reason) (rate(vllm:request_success_total{{{MODEL}}}[$__rate_interval]))",
            "{{finished_reason}}",
        ),
    )
    for title, says, metric in (
        (
            "vLLM's queue time, 95 % within",
            "Of requests that were let in. Those that never are do not show.",
            "request_queue_time_seconds",
        ),
        (
            "vLLM's time to first token, 95 % within",
            "Of requests that had one. Those that wait for ever do not show.",
            "time_to_first_token_seconds",
        ),
        (
            "vLLM's time between tokens, 95 % within",
            "A preemption in between shows as one long gap. Why it was long is not exposed.",
            "inter_token_latency_seconds",
        ),
    ):
        expr = f"sum by (model_name, engine, le) (rate(vllm:{metric}_bucket{{{MODEL}}}[5m]))"
        yield lines(title, says, (f"histogram_quantile(0.95, {expr})", name), unit="s")
    yield lines(
        "Steps per second",
        "Forward passes that did something. Passes that schedule nothing are not counted, so that a busy loop looks"
        " idle.",
        (_vllm_rate("iteration_tokens_total_count"), name),
    )


def _vllm_rate(metric: str) -> str:
    return f"sum by (model_name, engine) (rate(vllm:{metric}{{{MODEL}}}[$__rate_interval]))"
