"""OpenTelemetry, over OTLP: a trace for a request, a log record for a finding, the metrics of /metrics.

outlet.py      what the service has: all of it, wired
lives.py       what happened to each request that lives, kept as the stream comes
spans.py       a request that ended as a tree of spans
sampling.py    whose trace is kept, and why
ids.py         which trace a request is part of
logs.py        a finding that begins to fire or is resolved, as a log record
metrics.py     the families of /metrics as OTLP's metrics
exporters.py   where it goes: addresses, and the exporters for them
sender.py      a bounded queue before each exporter, tried again and counted
views.py       what /metrics says of it
"""
