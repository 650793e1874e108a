"""One OpenTelemetry span for each request that ended, over OTLP/HTTP, named by the GenAI semantic conventions.

https://opentelemetry.io/docs/specs/semconv/gen-ai/ for the gen_ai.* attributes; kvscope.* are ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode

from monitor.events.kinds import Cause, name_of
from monitor.events.kinds import Status as RequestStatus
from monitor.watch import Ended

FAILED = (RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_ABORTED)


class SpanOutlet:
    """Sends spans to the OTLP/HTTP endpoint `url` (its base: /v1/traces is added if it is not there).

    Spans wait in a bounded queue; while the collector is down the newest are dropped, and nothing else is affected.
    """

    def __init__(self, url: str) -> None:
        endpoint = url if url.rstrip("/").endswith("/v1/traces") else f"{url.rstrip('/')}/v1/traces"
        self._provider = TracerProvider(resource=Resource.create({"service.name": "kvscope"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=5)))
        self._tracer = self._provider.get_tracer("kvscope")

    def send(self, ended: Iterable[Ended]) -> None:
        """Queue a span for each."""
        for engine, record, offset in ended:
            start = record.received_ns or record.arrived_ns
            if not start or not record.finished_ns:
                continue  # we came too late to know when it began
            span = self._tracer.start_span("llm_request", kind=SpanKind.SERVER, start_time=start + offset)
            span.set_attributes(
                {
                    "gen_ai.operation.name": "text_completion",
                    "gen_ai.request.model": engine.partition("@")[0],
                    "gen_ai.request.max_tokens": record.max_tokens,
                    "gen_ai.usage.input_tokens": record.prompt_tokens,
                    "gen_ai.usage.output_tokens": record.output_tokens,
                    "gen_ai.response.id": record.id,
                    "gen_ai.response.finish_reasons": [name_of(RequestStatus, record.status).lower()],
                    "kvscope.engine": engine,
                    "kvscope.kv.peak_blocks": record.peak_blocks,
                    "kvscope.prefix_cache.hit_tokens": record.hit_tokens,
                    "kvscope.preemptions": record.preemptions,
                    "kvscope.preempted_tokens": record.tokens_lost,
                    "kvscope.client_gone": bool(record.client_gone_ns),
                    **{
                        f"kvscope.waited.{name_of(Cause, cause).lower()}_s": round(ns / 1e9, 6)
                        for cause, ns in record.waited_ns.items()
                    },
                }
            )
            for name, at in (("admitted", record.admitted_ns), ("first_token", record.first_token_ns)):
                if at:
                    span.add_event(name, timestamp=at + offset)
            if record.status in FAILED:
                span.set_status(Status(StatusCode.ERROR, name_of(RequestStatus, record.status)))
            span.end(end_time=record.finished_ns + offset)

    def close(self) -> None:
        """Send what is queued, for a few seconds at most."""
        self._provider.shutdown()
