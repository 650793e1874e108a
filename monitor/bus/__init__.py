"""NATS JetStream between the services that process engines and those that show a fleet (docs/scale-out.md).

bus_config.py      what `--nats` and its companions ask for
bus_messages.py    what travels: points, transitions of findings, annotations; versions and bounds
bus_subjects.py    names of subjects, streams and buckets, and what a tenant's credentials may do
bus_streams.py     makes the streams of a tenant
bus_tls.py         certificates that are renewed while a connection lasts
bus_connection.py  one connection: credentials, TLS, publishing exactly once, following a stream
bus_spool.py       what waits on this machine until a stream has acknowledged it
bus_thread.py      a thread with a connection, until it is stopped
bus_link.py        the thread of a service that publishes, follows and holds leases
fleet_fold.py      the streams folded to all engines, their state and their findings
fleet_reader.py   follows the streams into that fold
open_findings.py   which findings of an engine are open on the bus
rendezvous.py      which agent should process which engine
lease_table.py     the leases as one agent knows them, without I/O and without a clock
lease_keeper.py   keeps them: heartbeats, renewals, takeovers
"""
