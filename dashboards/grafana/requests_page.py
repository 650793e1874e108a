"""Why requests wait, for how long, how they end, what preemption costs."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries

from kvscope.dashboards.grafana.dashboard_frame import grafana_page
from kvscope.dashboards.grafana.panels import (
    EVENTS_S,
    GRID_WIDTH,
    REQUESTS,
    REQUESTS_S,
    SELECTED,
    TOKENS_S,
    Panel,
    heatmap,
    in_buckets,
    lines,
    now_in_buckets,
    quantile,
    rate,
    row_heading,
    stacked,
)
from kvscope.dashboards.objectives import OBJECTIVE, OBJECTIVE_FIRST_TOKEN_S, QUEUE_S


def requests_page() -> Dashboard:
    """The page."""
    return grafana_page(
        "requests", "kvscope / Requests", "Why requests wait, and how they end.", _request_panels(), view="requests"
    )


def by_state() -> TimeSeries:
    """The queues."""
    return stacked(
        "Requests, by state and reason",
        "Requests in each state, and the one reason why they are in it. Finished ones count only while they hold"
        " blocks. BEHIND_HEAD: stands behind a request that does not fit. Requests that come and go between two"
        " scrapes are not seen here.",
        (f"sum by (state, reason) (kvscope_requests{{{SELECTED}}})", "{{state}} {{reason}}"),
        unit=REQUESTS,
    )


def _request_panels() -> Iterator[Panel | Row]:
    yield row_heading("Queue now")
    yield from _waiting_panels()
    yield row_heading("Latency")
    yield from _latency_panels()
    yield row_heading("Ends of requests and preemption")
    yield from _request_end_panels()


def _waiting_panels() -> Iterator[Panel]:
    yield by_state()
    waiting = [
        (
            f'sum by (engine) (kvscope_request_waiting_seconds_bucket{{{SELECTED}, le="+Inf"}})'
            f' - sum by (engine) (kvscope_request_waiting_seconds_bucket{{{SELECTED}, le="{bound}"}})',
            f"longer than {bound} s, {{{{engine}}}}",
        )
        for bound in ("0.05", "1.0", "5.0", "60.0")
    ]
    yield lines(
        "Requests that wait, for so long",
        "Requests that arrived and have not been let in yet. What waits for ever is in here and in no histogram of"
        " requests that ended. Those preempted wait too, and are not in it.",
        *waiting,
        unit=REQUESTS,
        width=GRID_WIDTH // 2,
    )
    yield heatmap(
        "Waiting requests by age",
        "How many requests have waited for how long, at each moment: a band that climbs is a queue that does not move."
        " Those preempted are not in it.",
        now_in_buckets("kvscope_request_waiting_seconds"),
        counted=REQUESTS,
        width=GRID_WIDTH,
    )


def _latency_panels() -> Iterator[Panel]:
    for title, says, histogram, bad_from in (
        (
            "Queue time",
            "From arrival until first let in, of requests that ended in the last five minutes. Those that still wait"
            " are not in it: they are above.",
            "kvscope_request_queue_time_seconds",
            QUEUE_S,
        ),
        (
            "Time to first token",
            "From arrival at the scheduler until the first token, of requests that ended. The way from the client to"
            " the scheduler is not in it.",
            "kvscope_request_time_to_first_token_seconds",
            OBJECTIVE_FIRST_TOKEN_S,
        ),
        (
            "Time per output token",
            "Between two tokens of output, on average over each request that ended. A single long pause does not show.",
            "kvscope_request_time_per_output_token_seconds",
            None,
        ),
    ):
        median, most = quantile(0.5, histogram), quantile(0.95, histogram)
        drawn = (median, "p50, {{engine}}"), (most, "p95, {{engine}}")
        yield lines(title, says, *drawn, unit="s", bad_from=bad_from)
    for title, histogram in (
        ("Queue time, distribution", "kvscope_request_queue_time_seconds"),
        ("Time to first token, distribution", "kvscope_request_time_to_first_token_seconds"),
    ):
        yield heatmap(
            title,
            "How many requests that ended fell into each bucket, of all selected engines. Points are exemplars: a"
            " trace of one such request, where traces are sent (--otlp). Those that never end are not in it.",
            in_buckets(histogram),
            counted=REQUESTS,
            width=GRID_WIDTH // 2,
        )


def _request_end_panels() -> Iterator[Panel]:
    yield lines(
        "Requests that came and that ended, per second",
        "Arrivals at the scheduler, and ends by their status. Why a client aborted is not known: it may be a client"
        " that lost patience or one that had what it wanted.",
        (rate("kvscope_requests_arrived_total"), "arrived, {{engine}}"),
        (rate("kvscope_requests_finished_total", "status"), "{{status}}"),
        unit=REQUESTS_S,
    )
    yield lines(
        "Goodput",
        "Share of the requests that ended in the last five minutes, and were served with a first token within 2 s: the"
        " objective of the rules. Requests that never end are not in it.",
        (
            "sum by (engine) (rate(kvscope_request_time_to_first_token_seconds_bucket"
            f'{{{SELECTED}, outcome="served", le="{OBJECTIVE_FIRST_TOKEN_S}"}}[5m]))'
            f" / sum by (engine) (rate(kvscope_request_queue_time_seconds_count{{{SELECTED}}}[5m]))",
            "{{engine}}",
        ),
        unit="percentunit",
        good_from=OBJECTIVE,
    )
    yield lines(
        "Preemptions and allocations that failed, per second",
        "Running requests that lost their blocks, by reason, and allocations that did not get theirs. For whom one was"
        " preempted, the request's story tells.",
        (rate("kvscope_preemptions_total", "reason"), "preempted, {{reason}}"),
        (rate("kvscope_allocation_failures_total"), "allocation failed, {{engine}}"),
        unit=EVENTS_S,
    )
    yield lines(
        "Recompute tax",
        "Tokens computed a second time as a share of all computed: after preemptions, and though the prefix cache had"
        " them (at least so many). Prompts whose cached content was evicted meanwhile are not in it.",
        (
            f"{rate('kvscope_recomputed_tokens_total', 'engine, reason')}"
            f" / ignoring (reason) group_left {rate('kvscope_computed_tokens_total')}",
            "{{reason}}, {{engine}}",
        ),
        unit="percentunit",
    )
    yield lines(
        "Tokens lost to preemption, per second",
        "Computed tokens that preemption took, by reason. What of them the prefix cache still had when the request"
        " was let in again need not be computed: the recompute tax is what was.",
        (rate("kvscope_preempted_tokens_total", "reason"), "{{reason}}"),
        unit=TOKENS_S,
    )
