"""Brings events and samples in. A source is opened, polled for records and closed. A ledger applies the records.

source.py             the Source protocol, its status and options
source_registry.py         the source for a target, built-in or of a plug-in; targets.py: which kind a target is
live_stream.py        an engine's event stream, joined late and repaired when it has gaps
kv_event_stream.py    vLLM's KV events; kv_events.py: their wire format
metrics_page.py       an engine's metrics page
prometheus_history.py what a Prometheus server stored of engines; exposition.py: the metric names of both
log_file.py           an engine's log as a file, followed as it grows; engine_log.py: its lines; memory_log.py: its
                      memory breakdown; line_timestamps.py: its times
incident_report.py    a person's report
recording.py          a journal directory, one segment of it, or the one in a support bundle
guarded_source.py     a plug-in's source, contained
"""
