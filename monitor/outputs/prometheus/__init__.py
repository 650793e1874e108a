"""/metrics: the state of the ledgers, collected when Prometheus asks. Requests and blocks never become labels.

ledger_metrics.py   blocks, requests, steps, tokens, memory and the configuration of each engine
service_metrics.py  findings, the health of their inputs, alerts, the copies that go to an archive, NATS and OTLP; the
                    collector of the page, as of one time
"""

from .ledger_metrics import METRIC_HOLDERS
from .service_metrics import WatchCollector

__all__ = ["METRIC_HOLDERS", "WatchCollector"]
