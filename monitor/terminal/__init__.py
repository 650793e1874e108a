"""The `monitor` command line: one module for each command, and the reports that they print.

cli.py              finds the module of a command, and imports no other
commands/           the commands
report.py           the findings of `monitor doctor` over all targets, joined, as report.schema.json describes them
report_table.py     the same for a person: table, short, Markdown
watch_mode.py       `monitor doctor --watch`: which changes are worth a line
explain_text.py     `monitor explain`; memory_report.py: where a device's memory went
top_screen.py       `monitor top`; top_text.py: its text
frame_reader.py     what an engine emitted, from a recording or a stream
bundle_writer.py    support bundles, made anonymous by redaction.py
terminal.py         80 columns, black and white, and no character that a terminal obeys
"""
