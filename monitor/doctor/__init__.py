"""`monitor doctor`: inspects engines from any source, and reports problems and remedies.

observe.py         opens a target and reads it: a stream for a while, a recording or a log to its end, or a service
report.py          the findings over all targets, as the JSON that report.schema.json describes
report_table.py    the same for a person: table, short, markdown
memory_report.py   the memory breakdown of a log, computed again, and of running engines
explain_text.py    formats `monitor explain`, in the 80 columns of terminal.py
watch_mode.py      `monitor doctor --watch`, and top_screen.py: `monitor top`
bundle_writer.py   anonymized support bundles (redaction.py)
"""
