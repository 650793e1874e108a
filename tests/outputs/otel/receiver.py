"""A real OTLP receiver, over HTTP or gRPC: it takes what is exported to it, and can be down for a while."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2 as logs_pb2
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2_grpc as logs_grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Listens on one port for as long as it lives, though not always: `down` and `up`."""

    scheme: str

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def up(self) -> None:
        raise NotImplementedError

    def down(self) -> None:
        raise NotImplementedError

    def of(self, kind: type[Any]) -> list[Any]:
        return [one for one in self.received if isinstance(one, kind)]

    @property
    def spans(self) -> list[Span]:
        requests = self.of(trace_pb2.ExportTraceServiceRequest)
        return [span for got in requests for r in got.resource_spans for scope in r.scope_spans for span in scope.spans]

    @property
    def logs(self) -> list[LogRecord]:
        requests = self.of(logs_pb2.ExportLogsServiceRequest)
        return [
            log for got in requests for r in got.resource_logs for scope in r.scope_logs for log in scope.log_records
        ]

    @property
    def snapshots(self) -> list[list[Metric]]:
        requests = self.of(metrics_pb2.ExportMetricsServiceRequest)
        return [
            [m for r in got.resource_metrics for scope in r.scope_metrics for m in scope.metrics] for got in requests
        ]

    @property
    def services(self) -> set[str]:
        requests = self.of(trace_pb2.ExportTraceServiceRequest)
        reported = [attributes(r.resource.attributes) for got in requests for r in got.resource_spans]
        return {str(resource["service.name"]) for resource in reported}


class HttpReceiver(Receiver):
    scheme = "http"

    def up(self) -> None:
        self._server = _HttpServer(self)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def down(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = False

    def __init__(self, receiver: HttpReceiver) -> None:
        self.receiver = receiver
        super().__init__(("127.0.0.1", receiver.port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers["content-encoding"] == "gzip":
            body = gzip.decompress(body)
        kinds: dict[str, Any] = {
            "/v1/traces": trace_pb2.ExportTraceServiceRequest,
            "/v1/logs": logs_pb2.ExportLogsServiceRequest,
            "/v1/metrics": metrics_pb2.ExportMetricsServiceRequest,
        }
        self.server.receiver.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.server.receiver.received.append(kinds[self.path].FromString(body))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


class GrpcReceiver(Receiver):
    scheme = "grpc"

    def up(self) -> None:
        self._threads = ThreadPoolExecutor(2)
        self._server = grpc.server(self._threads)
        for add, base, answer in (
            (
                trace_grpc.add_TraceServiceServicer_to_server,
                trace_grpc.TraceServiceServicer,
                trace_pb2.ExportTraceServiceResponse,
            ),
            (
                logs_grpc.add_LogsServiceServicer_to_server,
                logs_grpc.LogsServiceServicer,
                logs_pb2.ExportLogsServiceResponse,
            ),
            (
                metrics_grpc.add_MetricsServiceServicer_to_server,
                metrics_grpc.MetricsServiceServicer,
                metrics_pb2.ExportMetricsServiceResponse,
            ),
        ):
            add(self._servicer(base, answer), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        self._server.start()

    def down(self) -> None:
        self._server.stop(0).wait()
        self._threads.shutdown()

    def _servicer(self, base: type[Any], answer: type[Any]) -> Any:
        receiver = self

        class Servicer(base):  # type: ignore[misc]
            def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's
                receiver.headers.append(dict(context.invocation_metadata()))
                receiver.received.append(request)
                return answer()

        return Servicer()


@contextmanager
def receiving(kind: type[Receiver]) -> Iterator[Receiver]:
    receiver = kind()
    try:
        yield receiver
    finally:
        receiver.down()


def attributes(pairs: Any) -> dict[str, Any]:
    """As Python has them."""
    values: dict[str, Any] = {}
    for pair in pairs:
        assert isinstance(pair, KeyValue)
        kind = pair.value.WhichOneof("value")
        values[pair.key] = (
            [v.string_value for v in pair.value.array_value.values]
            if kind == "array_value"
            else getattr(pair.value, kind)
        )
    return values
