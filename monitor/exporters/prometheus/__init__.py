"""/metrics: the state of the ledgers, collected when Prometheus asks. Requests and blocks never become labels.

collector.py               puts the page together, as of one time
metric_families.py         makes a family: names, units and the label every one has
pool_metrics.py            blocks: by holder, by residency, as they come and go, and the prefix cache
request_metrics.py         requests: by state and reason, by how they ended, how long they waited
work_metrics.py            steps, tokens, preemptions and their cost, the memory breakdown, the engine's configuration
observer_metrics.py        findings, the health of their inputs (the stream, its sources), and deliveries of alerts
outgoing_metrics.py        copies to other systems: archive, remote write, NATS (bus_metrics.py), OTLP (otlp_metrics.py)
source_change_metrics.py   sources added and removed, and the state of discoveries
"""

from kvscope.monitor.exporters.prometheus.collector import WatchCollector
from kvscope.monitor.exporters.prometheus.pool_metrics import METRIC_HOLDERS

__all__ = ["METRIC_HOLDERS", "WatchCollector"]
