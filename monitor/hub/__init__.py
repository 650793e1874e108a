"""`monitor hub`: the page and the API over all engines of a tenant. It keeps nothing, and any number of them may run.

fleet_query.py   answers `Query` from the streams, and from the agents that have the engines
hub_server.py    the running parts, their HTTP app, and how they end
hub_metrics.py   /metrics of a hub
"""
