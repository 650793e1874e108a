"""Where it goes: an OTLP endpoint's address, and the exporters for it.

    grpc://HOST:4317      OTLP/gRPC, in clear
    grpcs://HOST:4317     OTLP/gRPC over TLS
    http(s)://HOST:4318   OTLP/HTTP, protobuf; /v1/traces, /v1/logs and /v1/metrics are added

Headers, certificates, compression and timeouts are set by OpenTelemetry's own environment (OTEL_EXPORTER_OTLP_…).
"""

from __future__ import annotations

import os
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcTraces
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpTraces

from kvscope.monitor.errors import KvscopeError

OTLP_TIMEOUT_S: Final = 5.0
"""Timeout of one try, unless OTEL_EXPORTER_OTLP_TIMEOUT gives another. A try without an answer by then is repeated."""
_PATHS: Final = ("/v1/traces", "/v1/logs", "/v1/metrics")


class BadEndpoint(KvscopeError, ValueError):
    """An invalid address. The message names the valid forms."""


class Exporter(Protocol):
    """The interface of the exporters. `export` answers with an enum whose name is SUCCESS if all has arrived."""

    def export(self, batch: Any, /) -> Any:
        """Send it, within the timeout."""

    def shutdown(self) -> None:
        """Send no more. A try that waits gives up."""


class Exporters(NamedTuple):
    """One for each signal."""

    traces: Exporter
    logs: Exporter
    metrics: Exporter


def exporters_for(url: str) -> Exporters:
    """Return the exporters for an address. Raises BadEndpoint."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadEndpoint(_refusal(url)) from error
    if not parts.hostname or parts.scheme not in ("grpc", "grpcs", "http", "https"):
        raise BadEndpoint(_refusal(url))
    timeout = _timeout()
    if parts.scheme in ("grpc", "grpcs"):
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        target, clear = f"{host}:{port or 4317}", parts.scheme == "grpc"
        return Exporters(
            GrpcTraces(target, insecure=clear, timeout=timeout),
            GrpcLogs(target, insecure=clear, timeout=timeout),
            GrpcMetrics(target, insecure=clear, timeout=timeout),
        )
    base = url.rstrip("/")
    for path in _PATHS:
        base = base.removesuffix(path)
    traces, logs, metrics = (base + path for path in _PATHS)
    return Exporters(
        HttpTraces(traces, timeout=timeout), HttpLogs(logs, timeout=timeout), HttpMetrics(metrics, timeout=timeout)
    )


def _timeout() -> float:
    """Seconds, as OpenTelemetry's Python reads it."""
    try:
        return float(os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", OTLP_TIMEOUT_S))
    except ValueError as error:
        raise BadEndpoint(f"OTEL_EXPORTER_OTLP_TIMEOUT is not a number of seconds: {error}") from error


def _refusal(url: str) -> str:
    return f"{url!r} is no OTLP endpoint: give grpc://HOST:4317, grpcs://HOST:4317 or http(s)://HOST:4318"
