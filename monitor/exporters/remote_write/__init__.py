"""Remote write of points to Prometheus-compatible stores.

write_request.py    points as the protobuf of remote write 1.0, in snappy
spool.py            requests that wait, on disk
remote_writer.py    takes points from the ledgers, spools them, sends them
"""
