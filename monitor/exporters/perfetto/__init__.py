"""A Perfetto trace of what an engine did: requests, pool, queue and findings over time.

packets.py   tracks, slices, counters and instants, as packets of the trace's protobuf
export.py    which of them an engine's stream becomes
"""
