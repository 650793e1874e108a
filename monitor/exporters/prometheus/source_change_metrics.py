"""Sources added and removed while the service ran, and the state of its discoveries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvscope.monitor.schema import DiscoveryView


class SourceChangeFigures(NamedTuple):
    """Changes by kind, and the discoveries."""

    changes: Mapping[str, int] = {}
    discoveries: Sequence[DiscoveryView] = ()


class SourceChangeFamilies:
    """Added and removed sources, being filled. These belong to no engine."""

    def __init__(self) -> None:
        self.changes = CounterMetricFamily(
            "kvscope_source_changes", "Sources added and removed while the service ran.", labels=("change",)
        )
        self.targets = GaugeMetricFamily(
            "kvscope_discovery_targets", "Targets in the last list of a discovery.", labels=("discovery",)
        )
        self.blind = GaugeMetricFamily(
            "kvscope_discovery_blind",
            "1 while a discovery receives no list. The last list stays in force, and new engines are not watched.",
            labels=("discovery",),
        )

    def add(self, figures: SourceChangeFigures) -> None:
        """All of them."""
        for change, count in figures.changes.items():
            self.changes.add_metric((change,), count)
        for view in figures.discoveries:
            self.targets.add_metric((view.name,), view.targets)
            self.blind.add_metric((view.name,), int(view.is_blind))
