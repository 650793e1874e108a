"""OpenTelemetry, over OTLP: a trace for a request, a log record for a finding, the metrics of /metrics.

otel_exporter.py      the whole exporter, wired: which traces are kept, findings as log records, /metrics as OTLP
request_recorder.py   the events of each live request, kept as the stream comes
request_spans.py      a request that ended as a tree of spans, and the trace that it is part of
export_queue.py       a bounded queue before the exporter of each signal, with retries and counters
"""
