"""NATS JetStream between the services that process engines and those that show a fleet (docs/scale-out.md).

bus_config.py      what `--nats` and its companions ask for
bus_messages.py    what travels: points, transitions of findings, annotations; versions and bounds
bus_subjects.py    names of subjects, streams and buckets, and what a tenant's credentials may do
bus_streams.py     makes the streams of a tenant
bus_connection.py  one connection: credentials, TLS, publishing exactly once, following a stream
bus_spool.py       what waits on this machine until a stream has acknowledged it
bus_thread.py      a thread with a connection, until it is stopped
bus_link.py        the thread of a service that publishes, follows and holds leases
agent_clocks.py    how far the clocks of agents are off
fleet_owners.py    which agent's messages about an engine count
fleet_fold.py      the streams folded to all engines, their state and their findings
fleet_reader.py    follows the streams into that fold
open_findings.py   which findings of an engine are open on the bus
lease_table.py     the leases as one agent knows them, and which should have which, without I/O and without a clock
lease_keeper.py   keeps them: heartbeats, renewals, takeovers
bus_questions.py   questions that a hub sends to agents, and answers in parts; agent_answers.py answers them
fleet_link.py      the connection of a hub
hub_lease.py       which hub sends alerts
"""
