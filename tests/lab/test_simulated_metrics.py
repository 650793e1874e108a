"""The metrics page of an engine in virtual time reads as the whole page that a server exposes."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from kvscope.lab.simulated_metrics import KeptPages, ScrapeClock, page_of

LABELS = {"model_name": 'a "model" of\n\\ C:, {x}', "engine": "0"}


def families(running: float) -> list[Metric]:
    gauge = GaugeMetricFamily("vllm:num_requests_running", "Requests that are running.", labels=LABELS)
    gauge.add_metric([*LABELS.values()], running)
    counter = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens.", labels=LABELS)
    counter.add_metric([*LABELS.values()], 12_345_678_901_234)
    histogram = HistogramMetricFamily("vllm:time_to_first_token_seconds", "From arrival to the first token.")
    histogram.add_metric([], [("0.001", 3), ("+Inf", 7)], sum_value=1e-9)
    return [gauge, counter, histogram]


class Exposed:
    def __init__(self, metrics: list[Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> list[Metric]:
        return self.metrics


def as_scraped(metrics: list[Metric]) -> list[tuple[str, dict[str, str], str]]:
    registry = CollectorRegistry()
    registry.register(Exposed(metrics))
    page = text_string_to_metric_families(generate_latest(registry).decode())
    return [(one.name, one.labels, repr(one.value)) for family in page for one in family.samples]


def test_each_series_reads_as_from_the_whole_page() -> None:
    source = KeptPages(ScrapeClock())
    try:
        for running in (0, 3.0, 1e300, math.inf, math.nan):  # one after the other: names are kept, values are not
            page = source._families(page_of(families(running)))
            read = [(one.name, one.labels, repr(one.value)) for family in page for one in family.samples]
            assert read == as_scraped(families(running))
    finally:
        source.close()
