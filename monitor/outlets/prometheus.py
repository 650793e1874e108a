"""/metrics: what the ledgers hold, collected when Prometheus asks. Requests and blocks never become labels."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from monitor.events.kinds import FIRST_FINISHED, Limit, Preempt, Release, Stage, Status, name_of
from monitor.findings import Findings
from monitor.ledger.ledger import EngineLedger
from monitor.outlets.gpu import gpu_memory
from monitor.watch import Watch

HOLDERS = ("free", "cached_idle", "running", "waiting", "finished", "reserved", "unaccounted")


class WatchCollector:
    """A prometheus_client collector over everything that `watch` knows."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All metrics, of one moment."""
        families = _Families()
        with self.watch.locked():
            for name, ledger in self.watch.fleet.engines.items():
                if ledger.has_stream:
                    families.add_engine(name, ledger)
            families.add_findings(self.watch.findings)
        yield from families.all
        yield from gpu_memory()


class _Families:
    """The metric families, being filled."""

    def __init__(self) -> None:
        self.blocks = GaugeMetricFamily(
            "kvscope_blocks",
            "KV blocks of the pool by who holds them; every block counts once.",
            labels=("engine", "holder"),
        )
        self.unexplained = GaugeMetricFamily(
            "kvscope_unexplained_references",
            "References to blocks that no living request and no announced deferral explains.",
            labels=("engine",),
        )
        self.requests = GaugeMetricFamily(
            "kvscope_requests",
            "Requests by state and by the reason for it; finished ones only while they hold blocks.",
            labels=("engine", "state", "reason"),
        )
        self.stalled = GaugeMetricFamily(
            "kvscope_requests_stalled",
            "Requests that the engine's own watchdog says do not move, and that by the books have not moved since.",
            labels=("engine",),
        )
        self.findings = GaugeMetricFamily(
            "kvscope_findings", "Findings that are firing.", labels=("engine", "code", "severity", "verdict")
        )
        self.lost = CounterMetricFamily(
            "kvscope_stream_batches_lost",
            "Batches of events that nobody could supply, by the stage that lost them.",
            labels=("engine", "stage"),
        )
        self.dropped = CounterMetricFamily(
            "kvscope_stream_events_dropped", "Events that the engine's own buffer dropped.", labels=("engine",)
        )
        self.exact = GaugeMetricFamily(
            "kvscope_ledger_exact",
            "1 while the ledger is exact, 0 from a loss of events until the engine's next complete audit.",
            labels=("engine",),
        )
        self.heard = GaugeMetricFamily(
            "kvscope_engine_last_heard_timestamp_seconds", "When the engine last said anything.", labels=("engine",)
        )
        self.stopped = GaugeMetricFamily(
            "kvscope_engine_stopped", "1 once the engine has said that it ends, in good order.", labels=("engine",)
        )
        self.steps = CounterMetricFamily(
            "kvscope_steps", "Completed steps, by what kept each from being larger.", labels=("engine", "limit")
        )
        self.step_seconds = CounterMetricFamily("kvscope_step_seconds", "Time spent in steps.", labels=("engine",))
        self.allocated = CounterMetricFamily("kvscope_blocks_allocated", "Blocks handed out.", labels=("engine",))
        self.released = CounterMetricFamily(
            "kvscope_block_references_released",
            "References to blocks given back, by reason.",
            labels=("engine", "reason"),
        )
        self.evicted = CounterMetricFamily(
            "kvscope_blocks_evicted", "Cached blocks that lost their content.", labels=("engine",)
        )
        self.failures = CounterMetricFamily(
            "kvscope_allocation_failures", "Allocations that did not get their blocks.", labels=("engine",)
        )
        self.preemptions = CounterMetricFamily(
            "kvscope_preemptions", "Preemptions, counted when they happen, by reason.", labels=("engine", "reason")
        )
        self.tokens_lost = CounterMetricFamily(
            "kvscope_preempted_tokens", "Computed tokens lost to preemption.", labels=("engine",)
        )
        self.looked_up = CounterMetricFamily(
            "kvscope_prefix_cache_queried_tokens", "Tokens the prefix cache was asked for.", labels=("engine",)
        )
        self.hit = CounterMetricFamily(
            "kvscope_prefix_cache_hit_tokens", "Tokens the prefix cache had.", labels=("engine",)
        )
        self.computed = CounterMetricFamily("kvscope_computed_tokens", "Tokens computed.", labels=("engine",))
        self.output = CounterMetricFamily("kvscope_output_tokens", "Tokens generated.", labels=("engine",))
        self.finished = CounterMetricFamily(
            "kvscope_requests_finished", "Requests that ended, by their terminal status.", labels=("engine", "status")
        )
        self.client_gone = CounterMetricFamily(
            "kvscope_clients_gone", "Requests whose client closed the connection.", labels=("engine",)
        )
        self.restarts = CounterMetricFamily(
            "kvscope_engine_restarts", "Restarts of the engine seen by this service.", labels=("engine",)
        )
        self.faults = GaugeMetricFamily(
            "kvscope_engine_fault_on", "1 for each fault that was switched on by hand.", labels=("engine", "code")
        )
        self.all: list[Metric] = list(vars(self).values())

    def add_engine(self, name: str, ledger: EngineLedger) -> None:
        state, totals, balance = ledger.state, ledger.state.totals, ledger.balance()
        for holder in HOLDERS:
            self.blocks.add_metric((name, holder), getattr(balance, holder))
        self.unexplained.add_metric((name,), balance.unexplained_references)
        stalled = sum(bool(record.stalled_ns) for record in state.requests.values())
        self.stalled.add_metric((name,), stalled)
        by_state: dict[tuple[str, str], int] = {
            (Status.RUNNING.name, ""): 0,
            (Status.WAITING.name, ""): 0,
        }
        for record in state.requests.values():
            key = (name_of(Status, record.status), _reason(ledger, record.number, record.status))
            by_state[key] = by_state.get(key, 0) + 1
        for (status, reason), count in by_state.items():
            self.requests.add_metric((name, status, reason), count)
        for stage in Stage:
            self.lost.add_metric((name, stage.name.lower()), ledger.lost_batches[stage])
        self.dropped.add_metric((name,), ledger.dropped_events)
        self.exact.add_metric((name,), 0 if ledger.uncertain_since_ns else 1)
        self.heard.add_metric((name,), ledger.heard_ns / 1e9)
        self.stopped.add_metric((name,), 1 if state.stopped_ns else 0)
        for limit in Limit:
            self.steps.add_metric((name, limit.name), totals.limits.get(limit, 0))
        self.step_seconds.add_metric((name,), totals.step_ns / 1e9)
        self.allocated.add_metric((name,), totals.allocated)
        for release, count in totals.released.items():
            self.released.add_metric((name, name_of(Release, release)), count)
        self.evicted.add_metric((name,), totals.evicted)
        self.failures.add_metric((name,), totals.allocation_failures)
        for why in Preempt:
            self.preemptions.add_metric((name, why.name), totals.preemptions.get(why, 0))
        self.tokens_lost.add_metric((name,), totals.tokens_lost)
        self.looked_up.add_metric((name,), totals.looked_up_tokens)
        self.hit.add_metric((name,), totals.hit_tokens)
        self.computed.add_metric((name,), totals.computed_tokens)
        self.output.add_metric((name,), totals.output_tokens)
        for terminal in Status:
            if terminal >= FIRST_FINISHED:
                self.finished.add_metric((name, terminal.name), totals.finished.get(terminal, 0))
        self.client_gone.add_metric((name,), totals.client_gone)
        self.restarts.add_metric((name,), ledger.restarts)
        for code in dict.fromkeys(fault.partition(":")[0] for fault in ledger.description.faults):
            self.faults.add_metric((name, code), 1)

    def add_findings(self, findings: Findings) -> None:
        counts: dict[tuple[str, str, str, str], int] = {}
        for finding in findings.firing():
            judged = finding.judgement
            labels: tuple[str, str, str, str] = (judged.engine, judged.code, finding.severity, judged.verdict)
            counts[labels] = counts.get(labels, 0) + 1
        for labels, count in counts.items():
            self.findings.add_metric(labels, count)


def _reason(ledger: EngineLedger, number: int, status: int) -> str:
    record = ledger.state.requests[number]
    if status >= FIRST_FINISHED:
        return "FREE_DEFERRED" if number in ledger.state.deferrals else "UNACCOUNTED"
    cause = ledger.cause_of_wait(record)
    return cause.name if cause else ""
