"""Requests: by state and reason, by how they ended, how long they waited."""

from __future__ import annotations

from collections import Counter

from kvscope.monitor.events.kinds import FIRST_FINISHED, Status, name_of
from kvscope.monitor.exporters.prometheus.metric_families import (
    add_histogram,
    ages,
    counter,
    gauge,
    histogram,
    prometheus_buckets,
)
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.histogram import Histogram
from kvscope.monitor.ledger.latency import LATENCY_BOUNDS_S
from kvscope.monitor.state.records import RequestState


class RequestFamilies:
    """The families about requests, being filled."""

    def __init__(self) -> None:
        self.requests = gauge(
            "requests",
            "Requests by state and reason. Finished ones count only while they hold blocks.",
            "state",
            "reason",
        )
        self.stalled = gauge(
            "requests_stalled",
            "Requests without progress according to the engine's own watchdog, and without progress in the ledger"
            " since.",
        )
        self.waiting = ages("request_waiting_seconds", "Requests not yet admitted, by the time since their arrival.")
        self.queue = histogram(
            "request_queue_time_seconds",
            "The time from arrival to first admission of requests that ended, or to their end if they were never"
            " admitted.",
            "outcome",
        )
        self.first_token = histogram(
            "request_time_to_first_token_seconds",
            "The time from arrival at the scheduler to the first token of requests that ended.",
            "outcome",
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "The average time between two output tokens of each request that ended.",
            "outcome",
        )
        self.arrived = counter("requests_arrived", "Requests that reached the scheduler.")
        self.finished = counter("requests_finished", "Requests that ended, by their terminal status.", "status")
        self.client_gone = counter("clients_gone", "Requests whose client closed the connection.")

    def add(self, name: str, ledger: EngineLedger) -> None:
        """One engine's. O(requests)."""
        totals = ledger.state.totals
        by_state: Counter[tuple[int, str]] = Counter({(Status.RUNNING, ""): 0, (Status.WAITING, ""): 0})
        stalled, waiting = 0, Histogram(LATENCY_BOUNDS_S)
        for record in ledger.state.requests.values():
            by_state[record.status, _waiting_reason(ledger, record)] += 1
            stalled += bool(record.stalled_ns)
            if record.is_waiting and not record.admitted_ns:
                waiting.observe([round(ledger.age_s(record.arrived_ns) * 1e9)])
        for (status, reason), count in by_state.items():
            self.requests.add_metric((name, name_of(Status, status), reason), count)
        self.stalled.add_metric((name,), stalled)
        self.waiting.add_metric((name,), prometheus_buckets(waiting.buckets), waiting.seconds)
        for outcome, latencies in (("served", ledger.tally.served), ("failed", ledger.tally.failed)):
            add_histogram(self.queue, (name, outcome), latencies.queue)
            add_histogram(self.first_token, (name, outcome), latencies.first_token)
            add_histogram(self.per_token, (name, outcome), latencies.per_token)
        self.arrived.add_metric((name,), totals.arrived)
        for terminal in Status:
            if terminal >= FIRST_FINISHED:
                self.finished.add_metric((name, terminal.name), totals.finished.get(terminal, 0))
        self.client_gone.add_metric((name,), totals.client_gone)


def _waiting_reason(ledger: EngineLedger, record: RequestState) -> str:
    if record.is_running and not record.cause:
        return ""
    if record.is_finished:
        return "FREE_DEFERRED" if record.number in ledger.state.deferrals else "UNACCOUNTED"
    cause = ledger.cause_of_wait(record)
    return cause.name if cause else ""
