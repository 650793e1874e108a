"""Whether findings arrive in NATS, being filled. It has no series in a service without `--nats`."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvscope.monitor.bus_figures import BusFigures


class BusFamilies:
    """The metrics of the bus. They belong to no engine."""

    def __init__(self) -> None:
        self.connected = GaugeMetricFamily("kvscope_bus_connected", "1 while a NATS server answers.")
        self.away = GaugeMetricFamily(
            "kvscope_bus_away_seconds",
            "How long messages have waited because NATS or its stream accepts none. 0 while it accepts them.",
        )
        self.spooled = GaugeMetricFamily("kvscope_bus_spooled_messages", "Messages waiting to be sent.")
        self.spooled_bytes = GaugeMetricFamily("kvscope_bus_spooled_bytes", "Bytes of waiting messages.")
        self.published = CounterMetricFamily(
            "kvscope_bus_published", "Messages acknowledged by a stream, by kind.", labels=("kind",)
        )
        self.dropped = CounterMetricFamily(
            "kvscope_bus_dropped",
            "Messages given up, by kind: the spool was full, or another agent held the engine's lease meanwhile.",
            labels=("kind",),
        )
        self.leases = GaugeMetricFamily("kvscope_bus_leases", "Engines whose lease this agent holds.")
        self.taken_over = CounterMetricFamily(
            "kvscope_bus_taken_over", "Engines that this agent took over from one that did not renew its lease."
        )
        self.answered = CounterMetricFamily(
            "kvscope_bus_answered", "Questions of hubs that this agent answered, by outcome.", labels=("outcome",)
        )

    def add(self, figures: BusFigures) -> None:
        """All of them."""
        self.connected.add_metric((), int(figures.connected))
        self.away.add_metric((), figures.away_s)
        self.spooled.add_metric((), figures.spooled)
        self.spooled_bytes.add_metric((), figures.spooled_bytes)
        for kind, count in figures.published.items():
            self.published.add_metric((kind,), count)
        for kind, count in figures.dropped.items():
            self.dropped.add_metric((kind,), count)
        self.leases.add_metric((), figures.leases)
        self.taken_over.add_metric((), figures.taken_over)
        for outcome, count in figures.answered.items():
            self.answered.add_metric((outcome,), count)
