"""/metrics of a hub: engines and agents by state, findings that fire, questions, and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvscope.monitor.bus.fleet_link import FleetLink
from kvscope.monitor.fleet_schema import HARMS
from kvscope.monitor.hub.fleet_query import FleetQuery


class HubCollector(Collector):
    """The metrics of a hub. Engines are no labels: their agents expose them, each its own."""

    def __init__(self, link: FleetLink, query: FleetQuery) -> None:
        self._link = link
        self._query = query

    def collect(self) -> Iterator[Metric]:
        """Yield each family."""
        view = self._query.fleet_overview()
        connected = GaugeMetricFamily("kvscope_hub_connected", "1 while a NATS server answers.")
        connected.add_metric((), int(self._link.is_connected))
        yield connected
        engines = GaugeMetricFamily("kvscope_hub_engines", "Engines, by how badly they are off.", labels=("harm",))
        counts = Counter(engine.harm for engine in view.engines)
        for harm in HARMS:
            engines.add_metric((harm,), counts[harm])
        yield engines
        agents = GaugeMetricFamily("kvscope_hub_agents", "Agents, by whether they report.", labels=("reports",))
        silent = sum(bool(agent.error) for agent in view.agents)
        agents.add_metric(("yes",), len(view.agents) - silent)
        agents.add_metric(("no",), silent)
        yield agents
        asked = CounterMetricFamily("kvscope_hub_questions", "Questions to agents, by outcome.", labels=("outcome",))
        for outcome, count in self._link.asked.items():
            asked.add_metric((outcome,), count)
        yield asked
