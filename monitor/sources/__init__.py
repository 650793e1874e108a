"""Brings events and samples in. All end in records that a ledger applies: Batch, Keyframe, Sample, Fact, KvEvents.

live.py          an engine's event stream, joined late and repaired when it has gaps
recording.py     a journal directory, or one segment of it; record.py keeps one
metrics_page.py  an engine's metrics page
prometheus.py    what a Prometheus server stored of engines; exposition.py: the names of both
kv_events.py     vLLM's KV events
log.py           the text of an engine's log; memory_log.py: its memory bill; stamps.py: its times
prose.py         a person's report
target.py        tells which of these a target on the command line is, and reads those that are files
"""
