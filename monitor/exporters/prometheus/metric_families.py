"""How a family is made: kvscope_ before its name, and the engine as its first label."""

from __future__ import annotations

from math import isinf

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from kvscope.monitor.ledger.histogram import Buckets, Histogram


def gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    """Make a family of current values."""
    return GaugeMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def counter(name: str, help: str, *labels: str) -> CounterMetricFamily:
    """Make a family of counts. The page adds `_total` to the name."""
    return CounterMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def histogram(name: str, help: str, *labels: str) -> HistogramMetricFamily:
    """How long what is over took."""
    return HistogramMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def ages(name: str, help: str, *labels: str) -> GaugeHistogramMetricFamily:
    """How old is what goes on now: its buckets fall too, so neither rate() nor increase() is for it."""
    return GaugeHistogramMetricFamily(f"kvscope_{name}", help, labels=("engine", *labels))


def add_histogram(family: HistogramMetricFamily, labels: tuple[str, ...], counts: Histogram) -> None:
    """One engine's."""
    family.add_metric(labels, prometheus_buckets(counts.buckets), counts.seconds)


def prometheus_buckets(buckets: Buckets) -> list[tuple[str, float]]:
    """Return the bounds as Prometheus writes them."""
    return [("+Inf" if isinf(bound) else str(bound), count) for bound, count in buckets]
