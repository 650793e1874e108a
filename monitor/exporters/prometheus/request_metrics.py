"""Requests: by state and reason, by how they ended, how long they waited."""

from __future__ import annotations

from collections import Counter

from kvscope.monitor.events.kinds import FIRST_FINISHED, Status, name_of
from kvscope.monitor.exporters.prometheus.metric_families import add_histogram, ages, as_told, counter, gauge, histogram
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.histogram import Histogram
from kvscope.monitor.ledger.latency import LATENCY_BOUNDS_S
from kvscope.monitor.state.records import RequestState


class RequestFamilies:
    """The families about requests, being filled."""

    def __init__(self) -> None:
        self.requests = gauge(
            "requests",
            "Requests by state and by the reason for it; finished ones only while they hold blocks.",
            "state",
            "reason",
        )
        self.stalled = gauge(
            "requests_stalled",
            "Requests that the engine's own watchdog says do not move, and that by the books have not moved since.",
        )
        self.waiting = ages(
            "request_waiting_seconds", "Requests that have not been let in yet, by how long ago they arrived."
        )
        self.queue = histogram(
            "request_queue_time_seconds",
            "Of requests that ended: from arrival until first let in, or until the end of one that never was.",
            "outcome",
        )
        self.first_token = histogram(
            "request_time_to_first_token_seconds",
            "Of requests that ended: from arrival at the scheduler until the first token.",
            "outcome",
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Of requests that ended: between two tokens of output, on average over the request.",
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
        self.waiting.add_metric((name,), as_told(waiting.buckets), waiting.seconds)
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
