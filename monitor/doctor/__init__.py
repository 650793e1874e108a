"""`monitor doctor`: inspects engines from any source, and reports problems and remedies.

observe.py opens a target and reads it: a stream for a while, a recording or a log to its end, a service by asking
report.py what was found over all targets, as the JSON that report.schema.json describes render.py the same for a
person: table, short, markdown memory.py the memory bill of a log, done again, and of running engines explain.py what
`monitor explain` prints. terminal.py puts lines into 80 columns
"""
