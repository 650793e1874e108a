"""The families of /metrics as OTLP's metrics: whatever the collector gives, and no list of our own.

A counter is a monotonic sum, a histogram a histogram. Both are cumulative. OTLP has no histogram that falls, so the
buckets of a gaugehistogram are gauges by the names that the page gives them. Names stay, but for a counter's `_total`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from kvscope.monitor.exporters.otel.request_spans import SCOPE

OTEL_UNITS: Final = {"seconds": "s", "bytes": "By"}
"""By the last word of a name. Without one the unit is left out, so that no backend puts one into the name."""
Labels = tuple[tuple[str, str], ...]


def metrics_data(families: Iterable[Family], at_ns: int, resource: Resource) -> MetricsData:
    """All families, of one moment (wall ns)."""
    metrics = [metric for family in families for metric in _metrics(family, at_ns)]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def points_in(data: MetricsData) -> int:
    """How many there are in it."""
    return sum(
        len(metric.data.data_points)
        for of_resource in data.resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    )


def _metrics(family: Family, at_ns: int) -> Iterable[Metric]:
    def metric(name: str, data: Gauge | Sum | Histogram) -> Metric:
        return Metric(name, family.documentation, OTEL_UNITS.get(family.name.rpartition("_")[2], ""), data)

    def point(sample: Sample) -> NumberDataPoint:
        return NumberDataPoint(dict(sample.labels), 0, at_ns, sample.value)

    if not family.samples:
        return
    if family.type == "counter":
        totals = [point(sample) for sample in family.samples if sample.name.endswith("_total")]
        yield metric(family.name, Sum(totals, AggregationTemporality.CUMULATIVE, is_monotonic=True))
    elif family.type == "histogram":
        yield metric(family.name, Histogram(_histograms(family, at_ns), AggregationTemporality.CUMULATIVE))
    else:
        by_name: dict[str, list[NumberDataPoint]] = {}
        for sample in family.samples:
            by_name.setdefault(sample.name, []).append(point(sample))
        for name, points in by_name.items():
            yield metric(name, Gauge(points))


def _histograms(family: Family, at_ns: int) -> list[HistogramDataPoint]:
    """Prometheus counts up to each bound, OTLP between two."""
    buckets: dict[Labels, list[tuple[float, int]]] = {}
    sums: dict[Labels, float] = {}
    for sample in family.samples:
        labels = _without_bound(sample.labels)
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), round(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, counts in buckets.items():
        ups = [0, *(count for _, count in counts)]
        between = [after - before for before, after in pairwise(ups)]
        bounds = [bound for bound, _ in counts[:-1]]
        points.append(
            HistogramDataPoint(
                dict(labels), 0, at_ns, ups[-1], sums.get(labels, 0.0), between, bounds, float("nan"), float("nan")
            )
        )
    return points


def _without_bound(labels: Mapping[str, str]) -> Labels:
    return tuple((name, value) for name, value in labels.items() if name != "le")
