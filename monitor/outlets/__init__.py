"""Delivers what is known to where people are: they deliver, they do not judge.

prometheus/     /metrics, collected from the ledgers at each scrape
gpu.py          the devices' own figures, by NVML, where there is a GPU
alerts/         one message for each transition of a finding, from an outbox on disk: webhooks, Slack and others
perfetto/       a trace for ui.perfetto.dev, of a recording or a stream
otel/           OpenTelemetry: a trace for a request, a log record for a finding, the metrics of /metrics
"""
