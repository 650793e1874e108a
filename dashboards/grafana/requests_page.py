"""Why requests wait, for how long, how they end, what preemption costs."""

from __future__ import annotations

from collections.abc import Iterator

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries

from ..objectives import OBJECTIVE, OBJECTIVE_FIRST_TOKEN_S, QUEUE_S
from . import panels
from .panels import EVENTS_S, GRID_WIDTH, REQUESTS, REQUESTS_S, SELECTED, TOKENS_S, Panel


def requests_page() -> Dashboard:
    """Return the page of requests."""
    return panels.grafana_page(
        "requests", "kvscope / Requests", "Why requests wait, and how they end.", _panels(), view="requests"
    )


def by_state() -> TimeSeries:
    """Return the panel of the queues."""
    return panels.stacked(
        "Requests, by state and reason",
        "Requests by state and reason. Finished ones count only while they hold blocks. BEHIND_HEAD: queued behind"
        " a request that does not fit. Requests that come and go between two scrapes do not appear.",
        (f"sum by (state, reason) (kvscope_requests{{{SELECTED}}})", "{{state}} {{reason}}"),
        unit=REQUESTS,
    )


def _panels() -> Iterator[Panel | Row]:
    yield Row("Queue now")
    yield from _waiting_panels()
    yield Row("Latency")
    yield from _latency_panels()
    yield Row("Ends of requests and preemption")
    yield from _end_panels()


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
    yield panels.lines(
        "Waiting requests by waiting time",
        "Requests that arrived and are not admitted yet. A request that waits forever appears here, but in no"
        " histogram of completed requests. Preempted requests are not included.",
        *waiting,
        unit=REQUESTS,
        width=GRID_WIDTH // 2,
    )
    yield panels.heatmap(
        "Waiting requests by age",
        "Waiting requests by waiting time: a climbing band is a queue that does not move. Preempted requests are"
        " not included.",
        panels.now_in_buckets("kvscope_request_waiting_seconds"),
        counted=REQUESTS,
        width=GRID_WIDTH,
    )


def _latency_panels() -> Iterator[Panel]:
    for title, description, histogram, bad_from in (
        (
            "Queue time",
            "The time from arrival to first admission, for requests that ended in the last five minutes. Requests"
            " that still wait are not included: they are in the panels above.",
            "kvscope_request_queue_time_seconds",
            QUEUE_S,
        ),
        (
            "Time to first token",
            "The time from arrival at the scheduler to the first token, for requests that ended. The way from the"
            " client to the scheduler is not included.",
            "kvscope_request_time_to_first_token_seconds",
            OBJECTIVE_FIRST_TOKEN_S,
        ),
        (
            "Time per output token",
            "The average time between two output tokens of each request that ended. A single long pause does not show.",
            "kvscope_request_time_per_output_token_seconds",
            None,
        ),
    ):
        median, most = panels.quantile(0.5, histogram), panels.quantile(0.95, histogram)
        drawn = (median, "p50, {{engine}}"), (most, "p95, {{engine}}")
        yield panels.lines(title, description, *drawn, unit="s", bad_from=bad_from)
    for title, histogram in (
        ("Queue time, distribution", "kvscope_request_queue_time_seconds"),
        ("Time to first token, distribution", "kvscope_request_time_to_first_token_seconds"),
    ):
        yield panels.heatmap(
            title,
            "Completed requests per bucket, for all selected engines. Points are exemplars that link to a request's"
            " trace if you send traces (--otlp). Requests that never end are not included.",
            panels.in_buckets(histogram),
            counted=REQUESTS,
            width=GRID_WIDTH // 2,
        )


def _end_panels() -> Iterator[Panel]:
    yield panels.lines(
        "Requests arriving and ending, per second",
        "Arrivals at the scheduler, and ends by status. The reason for an abort is not known: the client may have"
        " given up or may have received what it needed.",
        (panels.rate("kvscope_requests_arrived_total"), "arrived, {{engine}}"),
        (panels.rate("kvscope_requests_finished_total", "status"), "{{status}}"),
        unit=REQUESTS_S,
    )
    yield panels.lines(
        "Goodput",
        "The share of requests that ended in the last five minutes with a first token within 2 s, which is the"
        " objective of the rules. Requests that never end are not included.",
        (
            "sum by (engine) (rate(kvscope_request_time_to_first_token_seconds_bucket"
            f'{{{SELECTED}, outcome="served", le="{OBJECTIVE_FIRST_TOKEN_S}"}}[5m]))'
            f" / sum by (engine) (rate(kvscope_request_queue_time_seconds_count{{{SELECTED}}}[5m]))",
            "{{engine}}",
        ),
        unit="percentunit",
        good_from=OBJECTIVE,
    )
    yield panels.lines(
        "Preemptions and failed allocations, per second",
        "Running requests that lost their blocks, by reason, and failed allocations. It does not show for which"
        " request one was preempted: its event history does.",
        (panels.rate("kvscope_preemptions_total", "reason"), "preempted, {{reason}}"),
        (panels.rate("kvscope_allocation_failures_total"), "allocation failed, {{engine}}"),
        unit=EVENTS_S,
    )
    yield panels.lines(
        "Recompute tax",
        "Recomputed tokens as a share of all computed tokens: after preemptions, and despite a cached prefix (a"
        " lower bound). Recomputation after an eviction is not included.",
        (
            f"{panels.rate('kvscope_recomputed_tokens_total', 'engine, reason')}"
            f" / ignoring (reason) group_left {panels.rate('kvscope_computed_tokens_total')}",
            "{{reason}}, {{engine}}",
        ),
        unit="percentunit",
    )
    yield panels.lines(
        "Tokens lost to preemption, per second",
        "Computed tokens lost to preemption, by reason. The prefix cache may restore some of them at the next"
        " admission. The recompute tax counts only what was computed again.",
        (panels.rate("kvscope_preempted_tokens_total", "reason"), "{{reason}}"),
        unit=TOKENS_S,
    )
