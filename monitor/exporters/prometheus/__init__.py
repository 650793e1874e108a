"""/metrics: what the ledgers hold, collected when Prometheus asks. Requests and blocks never become labels.

collector.py puts the page together, of one moment families.py how a family is made: names, units and the label every
one has pool.py blocks: by holder, by how long they stay, as they come and go. The prefix cache requests.py requests: by
state and reason, by how they ended, how long they waited work.py steps, tokens, preemptions and what they cost. The
memory bill. How the engine is configured observer.py findings, how far to trust all that (the stream, its sources), and
whether alerts arrive
"""

from kvscope.monitor.exporters.prometheus.collector import WatchCollector
from kvscope.monitor.exporters.prometheus.pool_metrics import METRIC_HOLDERS

__all__ = ["METRIC_HOLDERS", "WatchCollector"]
