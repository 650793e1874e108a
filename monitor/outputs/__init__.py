"""Exporters deliver ledgers and findings to other systems. They do not judge.

prometheus/        /metrics, collected from the ledgers at each scrape
otel/              OpenTelemetry: a trace for a request, a log record for a finding, the metrics of /metrics
perfetto_trace.py  a trace for ui.perfetto.dev, of a recording or a stream
gpu.py             the devices' own metrics, by NVML, where there is a GPU
"""
