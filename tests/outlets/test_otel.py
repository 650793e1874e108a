"""Spans to a real OTLP/HTTP receiver: one for each request that ended."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from monitor.outlets.otel import SpanOutlet
from tests.detectors.scenes import Watched


class Collector(ThreadingHTTPServer):
    """Takes what is exported to it."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    @property
    def spans(self) -> list[Span]:
        return [
            span for got in self.requests for r in got.resource_spans for scope in r.scope_spans for span in scope.spans
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        self.server.paths.append(self.path)
        self.server.requests.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.stop()


def attributes(span: Span) -> dict[str, object]:
    values: dict[str, object] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        values[pair.key] = (
            [v.string_value for v in pair.value.array_value.values]
            if kind == "array_value"
            else getattr(pair.value, kind)
        )
    return values


def busy() -> Watched:
    """Requests that end by length, one that is aborted, preemptions, prefix hits, one that still runs."""
    scene = Watched(total=33)
    prefix = list(range(16))
    for n in range(6):
        scene.lab.arrive([*prefix, 100 + n], max_tokens=30)
    scene.steps(3)
    scene.lab.abort(scene.lab.scheduler.running[1])
    scene.run_until_idle()
    scene.lab.arrive(8, max_tokens=100)
    scene.steps(3)
    return scene


def test_one_span_for_each_request_that_ended(collector: Collector) -> None:
    scene = busy()
    outlet = SpanOutlet(collector.url)
    outlet.send(scene.watch.take_ended())
    outlet.send(scene.watch.take_ended())  # told once
    outlet.close()
    assert set(collector.paths) == {"/v1/traces"}
    resources = {
        pair.key: pair.value.string_value
        for got in collector.requests
        for r in got.resource_spans
        for pair in r.resource.attributes
    }
    assert resources["service.name"] == "kvscope"
    spans = {str(attributes(span)["gen_ai.response.id"]): span for span in collector.spans}
    assert len(spans) == len(collector.spans) == 6
    offset = scene.now_ns - scene.lab.clock.monotonic_ns()
    for record in scene.ledger.ended:
        span = spans[record.id]
        said = attributes(span)
        assert (span.name, span.kind) == ("llm_request", Span.SPAN_KIND_SERVER)
        assert span.start_time_unix_nano == record.arrived_ns + offset
        assert span.end_time_unix_nano == record.finished_ns + offset
        assert said["gen_ai.request.model"] == "lab"
        assert said["gen_ai.usage.input_tokens"] == record.prompt_tokens > 0
        assert said["gen_ai.usage.output_tokens"] == record.output_tokens
        assert said["gen_ai.request.max_tokens"] == 30
        assert said["kvscope.engine"] == scene.ledger.engine
        assert said["kvscope.kv.peak_blocks"] == record.peak_blocks > 0
        assert said["kvscope.prefix_cache.hit_tokens"] == record.hit_tokens
        assert said["kvscope.preemptions"] == record.preemptions
        assert said["kvscope.preempted_tokens"] == record.tokens_lost
        waited = {str(k): v for k, v in said.items() if str(k).startswith("kvscope.waited.")}
        assert sum(float(str(v)) for v in waited.values()) == pytest.approx(sum(record.waited_ns.values()) / 1e9)
        events = {event.name: event.time_unix_nano for event in span.events}
        assert events["admitted"] == record.admitted_ns + offset
        assert ("first_token" in events) == bool(record.first_token_ns)
    assert max(record.preemptions for record in scene.ledger.ended) > 0
    assert max(record.hit_tokens for record in scene.ledger.ended) > 0
    reasons = {name: attributes(span)["gen_ai.response.finish_reasons"] for name, span in spans.items()}
    assert reasons["r-2"] == ["finished_aborted"]
    assert spans["r-2"].status.code == Status.STATUS_CODE_ERROR
    assert reasons["r-1"] == ["finished_length_capped"]
    assert spans["r-1"].status.code == Status.STATUS_CODE_UNSET


def test_a_request_that_leaks_its_blocks_has_its_span_when_it_ends(collector: Collector) -> None:
    scene = Watched(total=33, connector_share=1.0, faults=["leak.finished-held"])
    scene.lab.arrive(8, max_tokens=3)
    scene.run_until_idle()
    outlet = SpanOutlet(collector.url)
    outlet.send(scene.watch.take_ended())
    outlet.close()
    (span,) = collector.spans
    assert attributes(span)["gen_ai.response.id"] == "r-1"
    assert attributes(span)["kvscope.kv.peak_blocks"] == len(scene.lab.blocks_of(1))


def test_the_whole_path_may_be_given(collector: Collector) -> None:
    outlet = SpanOutlet(f"{collector.url}/v1/traces/")
    outlet.send(busy().watch.take_ended())
    outlet.close()
    assert len(collector.spans) == 6
    assert {path.rstrip("/") for path in collector.paths} == {"/v1/traces"}


def test_a_request_whose_beginning_is_not_known_has_no_span(collector: Collector) -> None:
    """Joined late, in the middle of a request that only an audit named: a span from nowhere would be a lie."""
    scene = busy()
    for record in scene.ledger.ended:
        record.arrived_ns = 0
    outlet = SpanOutlet(collector.url)
    outlet.send(scene.watch.take_ended())
    outlet.close()
    assert not collector.spans


def test_a_collector_that_is_down_affects_nothing_else(collector: Collector) -> None:
    collector.stop()
    scene = busy()
    outlet = SpanOutlet(collector.url)
    outlet.send(scene.watch.take_ended())
    scene.run_until_idle()
    assert scene.watch.take_ended()
    assert not scene.alarms()
    outlet.close()
