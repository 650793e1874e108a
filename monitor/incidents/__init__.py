"""The incident lab: every fault of kvscope's own engine, injected in virtual time and judged like a stream.

load.py        clients, and what they do
life.py        an engine as its judge sees it: whom an incident strikes, and since when
scenarios/     the table: which fault, on which engine, under which load, for how long
run.py         one run: the engine's life, its events as bytes, what the monitor found in them, and the verdict
report.py      many runs, and the figures over them

The only room of the monitor that imports the engine: it needs a checkout.
"""
