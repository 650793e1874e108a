"""Query handlers: schema structures computed from a ledger, of now or of the past. None changes a ledger.

handlers.py            the answer to each question of kvscope.monitor.query
engine_lookup.py       which engine a question is about, and which time
finding_list.py        findings by state and window
engines.py             an engine at a glance
request_details.py     requests, and one request's phases
blocks.py              the state of every block, and why one is held
block_colours.py       every block by owner, age, references or prefix
points.py              the pool and the queues over time
event_list.py          events, one by one
window_explanation.py  a window of time, in sentences
memory_usage.py        the device's memory, and what a load needs of the pool
stream_time.py         a time or a stream position, as users write it
recent_past.py         the recent past, from memory
past.py                the past, from memory or from history
window_stats.py        statistics of a window
comparison.py          two windows compared
"""
