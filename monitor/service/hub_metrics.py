"""/metrics of a hub: engines and agents by state, findings that fire, questions, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..fleet.fleet_link import FleetLink
from ..outputs.prometheus.service_metrics import WorkerFamilies
from ..questions.fleet_schema import HARMS
from .fleet_query import FleetQuery


class HubCollector(Collector):
    """The metrics of a hub. Engines are no labels: their agents expose them, each its own."""

    def __init__(self, link: FleetLink, query: FleetQuery) -> None:
        self._link = link
        self._query = query

    def collect(self) -> Iterator[Metric]:
        """Yield each family."""
        view = self._query.fleet_overview()
        yield GaugeMetricFamily("kvscope_hub_connected", "1 while a NATS server answers.", int(self._link.is_connected))
        harms = Counter(engine.harm for engine in view.engines)
        engines = GaugeMetricFamily("kvscope_hub_engines", "Engines, by how badly they are off.", labels=("harm",))
        yield _filled(engines, {harm: harms[harm] for harm in HARMS})
        silent = sum(bool(agent.error) for agent in view.agents)
        agents = GaugeMetricFamily("kvscope_hub_agents", "Agents, by whether they report.", labels=("reports",))
        yield _filled(agents, {"yes": len(view.agents) - silent, "no": silent})
        asked = CounterMetricFamily("kvscope_hub_questions", "Questions to agents, by outcome.", labels=("outcome",))
        yield _filled(asked, self._link.asked)
        workers = WorkerFamilies()
        workers.add(self._link.supervisor)
        yield from vars(workers).values()
        with self._link.fold() as fold:
            refused, corrected = dict(fold.owners.refused), fold.clocks.corrected
        not_taken = CounterMetricFamily(
            "kvscope_hub_refused",
            "Messages of agents that count for nothing, by reason: the engine is another agent's (not-owner), or it is"
            " beyond the bound of the agent (agent-full) or of the tenant (tenant-full).",
            labels=("reason",),
        )
        yield _filled(not_taken, refused)
        yield CounterMetricFamily(
            "kvscope_hub_times_corrected",
            "Messages whose agent's clock was ahead, and that got the time of their receipt.",
            corrected,
        )


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, int]) -> Metric:
    """Return the family with a sample for each value of its label."""
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
