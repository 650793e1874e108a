"""The metrics are those of the page, which names traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from kvscope.monitor.outputs.prometheus import WatchCollector
from kvscope.monitor.outputs.prometheus.service_metrics import Exemplars
from kvscope.monitor.service.http_api import create_app
from tests.detectors.scenes import Watched
from tests.outputs.otel.receiver import Receiver, attributes
from tests.outputs.otel.sent import busy, roots, sending

OF_THEIR_TIME = ("kvscope_gpu_", "kvscope_threads")
"""What may differ between two looks."""


def test_the_metrics_are_those_of_the_page(receiver: Receiver) -> None:
    scene = busy(Watched(total=33))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch))
    page = generate_latest(registry).decode()
    with sending(receiver.url, scene):
        pass  # the last snapshot is sent at the end
    (snapshot,) = receiver.snapshots
    on_page = {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
        if family.name.startswith("kvscope_") and not family.name.startswith(OF_THEIR_TIME)
    }
    ours = [m for m in snapshot if m.name.startswith("kvscope_") and not m.name.startswith(OF_THEIR_TIME)]
    sent = dict(as_samples(ours))
    assert sent == on_page
    units = {metric.name: metric.unit for metric in snapshot}
    assert (units["kvscope_block_lifetime_seconds"], units["kvscope_blocks"]) == ("s", "")


def as_samples(metrics: Iterable[Metric]) -> Iterator[tuple[tuple[object, ...], float]]:
    """As Prometheus writes them."""
    for metric in metrics:
        kind = metric.WhichOneof("data")
        if kind == "histogram":
            assert metric.histogram.aggregation_temporality == 2
            for point in metric.histogram.data_points:
                labels, count = attributes(point.attributes), 0
                for bound, more in zip([*map(str, point.explicit_bounds), "+Inf"], point.bucket_counts, strict=True):
                    count += more
                    yield (f"{metric.name}_bucket", *sorted({**labels, "le": bound}.items())), count
                yield (f"{metric.name}_count", *sorted(labels.items())), point.count
                yield (f"{metric.name}_sum", *sorted(labels.items())), point.sum
            continue
        assert kind == "gauge" or (metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2)
        for number in metric.gauge.data_points if kind == "gauge" else metric.sum.data_points:
            labels, value = attributes(number.attributes), number.WhichOneof("value")
            name = metric.name if kind == "gauge" else f"{metric.name}_total"
            yield (name, *sorted(labels.items())), getattr(number, str(value))


def test_a_bucket_of_the_page_names_a_trace(over_http: Receiver) -> None:
    scene = Watched(total=33)
    exemplars = Exemplars()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch, exemplars=exemplars))
    with sending(over_http.url, scene) as outlet:
        busy(scene)
        for (engine, record, offset), span in outlet.send(scene.watch.take_ended()):
            exemplars.note(engine, record, (record.finished_ns + offset) / 1e9, span.trace_id, span.span_id)
    known = {span.trace_id.hex() for span in roots(over_http).values()}
    counted, with_trace = 0, 0
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        below = 0.0
        for sample in family.samples:
            if "_bucket" not in sample.name or not family.name.startswith("kvscope_request_"):
                assert sample.exemplar is None
                continue
            if family.name == "kvscope_request_waiting_seconds":
                continue
            counted += sample.value > below
            below = sample.value if sample.labels["le"] != "+Inf" else 0.0
            if sample.exemplar is not None:
                with_trace += 1
                assert sample.exemplar.labels["trace_id"] in known
                assert sample.exemplar.value <= float(sample.labels["le"])
    assert with_trace == counted > 0


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4"])
def test_the_page_has_exemplars_for_who_asks_for_openmetrics_and_the_same_figures_for_all(accept: str) -> None:
    scene = busy(Watched(total=33))
    exemplars = Exemplars()
    for engine, record, offset in scene.watch.take_ended():
        exemplars.note(engine, record, (record.finished_ns + offset) / 1e9, 1, 2)
    collector = WatchCollector(scene.watch, exemplars=exemplars)
    with TestClient(create_app(scene.watch, list, None, collector), base_url="http://localhost") as client:
        answer = client.get("/metrics", headers={"accept": accept})
    is_open = accept.startswith("application/openmetrics-text")
    assert answer.headers["content-type"].startswith("application/openmetrics-text" if is_open else "text/plain")
    exemplar = f'# {{span_id="{2:016x}",trace_id="{1:032x}"}}'
    assert (exemplar in answer.text) == is_open
    registry = CollectorRegistry(auto_describe=False)
    registry.register(WatchCollector(scene.watch))
    kvscopes = lambda page: {  # noqa: E731
        line.partition(" # ")[0]
        for line in page.splitlines()
        if line.startswith("kvscope_") and not line.startswith("kvscope_gpu_")
    }
    assert kvscopes(answer.text) == kvscopes(generate_latest(registry).decode())
