"""OpenTelemetry, over OTLP: a trace for a request, a log record for a finding, the metrics of /metrics.

otel_exporter.py      the whole exporter, wired
request_recorder.py   the events of each live request, kept as the stream comes
request_spans.py      a request that ended as a tree of spans
trace_sampling.py     which traces are kept, and why
trace_ids.py          the trace that a request is part of
finding_logs.py       a finding that begins to fire or is resolved, as a log record
metric_bridge.py      the families of /metrics as OTLP's metrics
otlp_exporters.py     addresses, and the exporters for them
export_queue.py       a bounded queue before each exporter, with retries and counters
otel_schema.py        the counters in /metrics
"""
