"""Limits that the rules of Prometheus alert on and that the dashboards of Grafana draw as thresholds."""

from __future__ import annotations

from typing import Final

OBJECTIVE: Final = 0.99
OBJECTIVE_FIRST_TOKEN_S: Final = 2.0
QUEUE_S: Final = 5.0
MISSED_AFTER_S: Final = 15
"""An engine sends a heartbeat a second."""
UNDELIVERED_AFTER_S: Final = 600
