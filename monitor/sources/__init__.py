"""Brings events and samples in. A source is opened, polled for records and closed. A ledger applies the records.

source.py             the Source protocol, its status and options
source_registry.py    the source for a target, built-in or of a plug-in; targets.py: which kind a target is
live_stream.py        an engine's event stream, joined late and repaired when it has gaps
kv_event_stream.py    vLLM's KV events
metrics_page.py       an engine's metrics page
prometheus_history.py what a Prometheus server stored of engines; exposition.py: the metric names of both
log_file.py           logs as files, followed as they grow; engine_log.py: their lines; memory_log.py: their memory
                      breakdown; pasted_lines.py: how people paste them; log_patterns/: classes of lines
incident_report.py    a person's report; text_events.py: events and states in a text; report_phrases.py: what people
                      say, in the words of report_phrases.toml
recording.py          a journal directory, one segment of it, or the one in a support bundle
discovery_config.py   discoveries, and the targets that they name; finders.py: what asks for these
"""
