"""A Perfetto trace of an engine: requests, pool, queue and findings over time.

packets.py   tracks, slices, counters and instants, as packets of the trace's protobuf
trace.py     an engine's stream as tracks, slices, counters and instants
"""
