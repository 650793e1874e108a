"""The questions about engines, and who answers them. No answer changes a ledger.

query.py, schema.py    the table of questions, and the structures that answer them (fleet_schema.py: a fleet's)
pipeline.py            from records to findings, in one process
client.py, session.py  who asks: a client of a service, and the Python API
observe.py             opens a target, with the part of its past that is asked for, and judges it
handlers.py            the answer to each question
fleet_overview.py      every engine in a line, what several have in common, and services in two halves
engines.py             an engine at a glance
request_details.py     requests, one request's phases, and the search for an id
blocks.py              the state of every block, why one is held, and its colours
event_list.py          events, one by one
windows.py             a window of time: points, findings, and sentences
comparison.py          statistics of a window, and two windows compared
memory_usage.py        the device's memory, what a load needs of the pool, and the plan
past.py                which engine and which time is meant, and the past, from memory, history or a server's store
recent_past.py         times as users write them, and the recent past, from memory
"""
