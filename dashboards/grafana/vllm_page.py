"""A plain vLLM, by its own metrics: no kvscope needed. Names as of vLLM 0.20 and later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from ..objectives import OBJECTIVE_FIRST_TOKEN_S, QUEUE_S
from . import panels
from .panels import EVENTS_S, GRID_WIDTH, REQUESTS, REQUESTS_S, STEPS_S, TARGETS, TOKENS_S, Panel

MODEL: Final = f'model_name=~"$model", {TARGETS}'
ONE_VLLM: Final = "namespace, instance, model_name, engine"
"""Labels that identify an engine. Without Kubernetes the first is empty."""
VLLM_NAME: Final = "{{model_name}}/{{engine}} {{instance}} {{namespace}}"


def vllm_page() -> Dashboard:
    """Return the page of a plain vLLM."""
    description = "vLLM's own metrics, and their limits."
    return panels.vllm_dashboard("vllm", "kvscope / A plain vLLM", description, _panels(), MODEL)


def _panels() -> Iterator[Panel | Row]:
    yield Row("Now")
    yield from _state_panels()
    yield Row("Pool and queue")
    yield from _queue_panels()
    yield Row("Work")
    yield from _work_panels()
    yield Row("Latency")
    yield from _latency_panels()


def _state_panels() -> Iterator[Panel]:
    yield panels.stat(
        "KV cache usage",
        "The share of used blocks. vLLM does not expose which requests hold them and why, so a leak looks like load.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", VLLM_NAME),
        unit="percentunit",
    )
    yield panels.stat(
        "In use with nothing running",
        "The share of used blocks while no request runs or waits. A lasting value other than 0 is held by requests"
        " that ended. No data is normal.",
        (
            f"vllm:kv_cache_usage_perc{{{MODEL}}}"
            " and vllm:num_requests_running == 0 and vllm:num_requests_waiting == 0",
            VLLM_NAME,
        ),
        unit="percentunit",
        bad_from=0.01,
    )
    yield panels.stat(
        "Running",
        "Running requests. A request that receives no tokens also counts.",
        (f"vllm:num_requests_running{{{MODEL}}}", VLLM_NAME),
        unit=REQUESTS,
    )
    yield panels.stat(
        "Waiting",
        "Waiting requests. Requests that never reached the scheduler are not included.",
        (f"vllm:num_requests_waiting{{{MODEL}}}", VLLM_NAME),
        unit=REQUESTS,
    )


def _queue_panels() -> Iterator[Panel]:
    yield panels.lines(
        "KV cache usage over time",
        "Usage that never returns to 0 between loads is a leak or a pinned session. vLLM does not show which.",
        (f"vllm:kv_cache_usage_perc{{{MODEL}}}", VLLM_NAME),
        unit="percentunit",
        width=GRID_WIDTH // 2,
    ).max(1)
    yield panels.stacked(
        "Requests running and waiting",
        "Waiting requests by reason: capacity (no room), deferred (waits for KV, a grammar or similar). vLLM"
        " exposes waiting times only after a request ends.",
        (f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
        (f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{MODEL}}})", "waiting, {{reason}}"),
        unit=REQUESTS,
    )


def _work_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Preemptions per second",
        "vLLM counts a preemption only with the request's next token: it never counts a request that is preempted"
        " forever.",
        (_rate("num_preemptions_total"), VLLM_NAME),
        unit=EVENTS_S,
    )
    yield panels.lines(
        "vLLM's tokens per second",
        "Prompt and generated tokens. Recomputed tokens are not separated.",
        (_rate("prompt_tokens_total"), f"prompt, {VLLM_NAME}"),
        (_rate("generation_tokens_total"), f"generated, {VLLM_NAME}"),
        unit=TOKENS_S,
    )
    yield panels.lines(
        "vLLM's prefix cache hits",
        "The hit rate by tokens. vLLM does not expose whether a miss was evicted or never cached.",
        (f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}", VLLM_NAME),
        unit="percentunit",
    )
    yield panels.lines(
        "Requests that ended, per second",
        "By reason. vLLM does not count requests that a client aborted, and requests dropped by the front end leave"
        " no trace here.",
        (
            f"sum by (finished_reason) (rate(vllm:request_success_total{{{MODEL}}}[$__rate_interval]))",
            "{{finished_reason}}",
        ),
        unit=REQUESTS_S,
    )
    yield panels.lines(
        "Steps per second",
        "Forward passes with work. vLLM does not count passes that schedule nothing, so a busy loop looks idle.",
        (_rate("iteration_tokens_total_count"), VLLM_NAME),
        unit=STEPS_S,
    )
    yield panels.lines(
        "Length of requests that ended",
        "Prompt and output tokens of requests that ended in the last five minutes. Requests that never end are not"
        " included.",
        *(
            (_quantile(share, f"request_{part}_tokens"), f"{part} p{100 * share:g}, {VLLM_NAME}")
            for part in ("prompt", "generation")
            for share in (0.5, 0.95)
        ),
        unit="suffix: tokens",
    )


def _latency_panels() -> Iterator[Panel]:
    for title, description, metric, bad_from in (
        (
            "vLLM's queue time",
            "For admitted requests. Requests that are never admitted do not show.",
            "request_queue_time_seconds",
            QUEUE_S,
        ),
        (
            "vLLM's time to first token",
            "For requests that received one. Requests that wait forever do not show.",
            "time_to_first_token_seconds",
            OBJECTIVE_FIRST_TOKEN_S,
        ),
        (
            "vLLM's time between tokens",
            "A preemption shows as one long gap. vLLM does not expose the cause of a gap.",
            "inter_token_latency_seconds",
            None,
        ),
    ):
        drawn = ((_quantile(share, metric), f"p{100 * share:g}, {VLLM_NAME}") for share in (0.5, 0.95))
        yield panels.lines(title, description, *drawn, unit="s", bad_from=bad_from)
    for title, metric in (
        ("vLLM's queue time, distribution", "request_queue_time_seconds"),
        ("vLLM's time to first token, distribution", "time_to_first_token_seconds"),
    ):
        yield panels.heatmap(
            title,
            "Requests per bucket, for all selected engines. Requests that wait forever do not show.",
            f"sum by (le) (increase(vllm:{metric}_bucket{{{MODEL}}}[$__rate_interval]))",
            counted=REQUESTS,
            width=GRID_WIDTH // 2,
        )


def _quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by ({ONE_VLLM}, le) (rate(vllm:{metric}_bucket{{{MODEL}}}[5m])))"


def _rate(metric: str) -> str:
    return f"sum by ({ONE_VLLM}) (rate(vllm:{metric}{{{MODEL}}}[$__rate_interval]))"
