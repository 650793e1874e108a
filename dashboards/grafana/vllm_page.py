"""A plain vLLM, by its own metrics: no kvscope needed. Names as of vLLM 0.20 and later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from kvscope.dashboards.grafana.dashboard_frame import vllm_dashboard
from kvscope.dashboards.grafana.panels import (
    EVENTS_S,
    GRID_WIDTH,
    REQUESTS,
    REQUESTS_S,
    STEPS_S,
    TARGETS,
    TOKENS_S,
    Panel,
    heatmap,
    lines,
    row_heading,
    stacked,
    stat,
)
from kvscope.dashboards.objectives import OBJECTIVE_FIRST_TOKEN_S, QUEUE_S

MODEL: Final = f'model_name=~"$model", {TARGETS}'
ONE_VLLM: Final = "namespace, instance, model_name, engine"
"""Labels that tell two engines apart. Of one without Kubernetes the first is empty."""
VLLM_NAME: Final = "{{model_name}}/{{engine}} {{instance}} {{namespace}}"


def vllm_page() -> Dashboard:
    """The page."""
    says = "vLLM's own metrics, and what they cannot tell."
    return vllm_dashboard("vllm", "kvscope / A plain vLLM", says, _vllm_panels(), MODEL)


def _vllm_panels() -> Iterator[Panel | Row]:
    yield row_heading("Now")
    yield from _vllm_state_panels()
    yield row_heading("Pool and queue")
    yield from _vllm_queue_panels()
    yield row_heading("Work")
    yield from _vllm_work_panels()
    yield row_heading("Latency")
    yield from _vllm_latency_panels()


def _vllm_state_panels() -> Iterator[Panel]:
    yield stat(
        "KV cache usage",
        "The share of blocks in use. Which requests hold them, whether they live, and why, vLLM does not expose: a leak"
        " looks like load.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", VLLM_NAME),
        unit="percentunit",
    )
    yield stat(
        "In use with nothing running",
        "The share of blocks in use while no request runs or waits. Anything but 0 that stays is held by requests that"
        " are over; no data is as it should be.",
        (
            f"vllm:kv_cache_usage_perc{{{MODEL}}}"
            " and vllm:num_requests_running == 0 and vllm:num_requests_waiting == 0",
            VLLM_NAME,
        ),
        unit="percentunit",
        bad_from=0.01,
    )
    yield stat(
        "Running",
        "Requests that the scheduler has running. One that is given no token at any step counts too.",
        (f"vllm:num_requests_running{{{MODEL}}}", VLLM_NAME),
        unit=REQUESTS,
    )
    yield stat(
        "Waiting",
        "Requests that the scheduler has waiting. Those that never reached it are not in it.",
        (f"vllm:num_requests_waiting{{{MODEL}}}", VLLM_NAME),
        unit=REQUESTS,
    )


def _vllm_queue_panels() -> Iterator[Panel]:
    yield lines(
        "KV cache usage over time",
        "Usage that never comes back to 0 between loads is a leak or a pinned session, and vLLM does not tell which.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", VLLM_NAME),
        unit="percentunit",
        width=GRID_WIDTH // 2,
    )
    yield stacked(
        "Requests running and waiting",
        "Waiting by reason: capacity (no room), deferred (waits for KV, a grammar or the like). For how long each has"
        " waited is not exposed before it ends.",
        (f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
        (f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{MODEL}}})", "waiting, {{reason}}"),
        unit=REQUESTS,
    )


def _vllm_work_panels() -> Iterator[Panel]:
    yield lines(
        "Preemptions per second",
        "vLLM counts a preemption only with the victim's next token: a request that is preempted for ever is never"
        " counted.",
        (_vllm_rate("num_preemptions_total"), VLLM_NAME),
        unit=EVENTS_S,
    )
    yield lines(
        "vLLM's tokens per second",
        "Prompt tokens and tokens generated. What is computed again after a preemption is not told apart.",
        (_vllm_rate("prompt_tokens_total"), f"prompt, {VLLM_NAME}"),
        (_vllm_rate("generation_tokens_total"), f"generated, {VLLM_NAME}"),
        unit=TOKENS_S,
    )
    yield lines(
        "vLLM's prefix cache hits",
        "Share of the tokens looked up that the cache had. Whether what is missing was evicted or never there is not"
        " exposed.",
        (f"{_vllm_rate('prefix_cache_hits_total')} / {_vllm_rate('prefix_cache_queries_total')}", VLLM_NAME),
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
        unit=REQUESTS_S,
    )
    yield lines(
        "Steps per second",
        "Forward passes that did something. Passes that schedule nothing are not counted, so that a busy loop looks"
        " idle.",
        (_vllm_rate("iteration_tokens_total_count"), VLLM_NAME),
        unit=STEPS_S,
    )
    yield lines(
        "Length of requests that ended",
        "Tokens of prompts and of outputs, of requests that ended in the last five minutes. Those that never end are"
        " not in it.",
        *(
            (_vllm_quantile(share, f"request_{part}_tokens"), f"{part} p{100 * share:g}, {VLLM_NAME}")
            for part in ("prompt", "generation")
            for share in (0.5, 0.95)
        ),
        unit="suffix: tokens",
    )


def _vllm_latency_panels() -> Iterator[Panel]:
    for title, says, metric, bad_from in (
        (
            "vLLM's queue time",
            "Of requests that were let in. Those that never are do not show.",
            "request_queue_time_seconds",
            QUEUE_S,
        ),
        (
            "vLLM's time to first token",
            "Of requests that had one. Those that wait for ever do not show.",
            "time_to_first_token_seconds",
            OBJECTIVE_FIRST_TOKEN_S,
        ),
        (
            "vLLM's time between tokens",
            "A preemption in between shows as one long gap. Why it was long is not exposed.",
            "inter_token_latency_seconds",
            None,
        ),
    ):
        drawn = ((_vllm_quantile(share, metric), f"p{100 * share:g}, {VLLM_NAME}") for share in (0.5, 0.95))
        yield lines(title, says, *drawn, unit="s", bad_from=bad_from)
    for title, metric in (
        ("vLLM's queue time, distribution", "request_queue_time_seconds"),
        ("vLLM's time to first token, distribution", "time_to_first_token_seconds"),
    ):
        yield heatmap(
            title,
            "How many requests fell into each bucket, of all selected engines. Those that wait for ever do not show.",
            f"sum by (le) (increase(vllm:{metric}_bucket{{{MODEL}}}[$__rate_interval]))",
            counted=REQUESTS,
            width=GRID_WIDTH // 2,
        )


def _vllm_quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by ({ONE_VLLM}, le) (rate(vllm:{metric}_bucket{{{MODEL}}}[5m])))"


def _vllm_rate(metric: str) -> str:
    return f"sum by ({ONE_VLLM}) (rate(vllm:{metric}{{{MODEL}}}[$__rate_interval]))"
