"""`monitor serve` without the page, in a process that a test can kill; its times are short.

python -m tests.outputs.alerts_service OUTBOX RECEIVER LOOK_AGAIN_S ENDPOINT…
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.outputs.alerting.alerting import AlertsConfig
from kvscope.monitor.service.service import ServiceConfig
from kvscope.monitor.service.web_server import LoadedConfig, serve

SCHEDULE = (0.0, 0.05, 0.1, 0.2) + (0.4,) * 60
"""A receiver that fails half of the time fails 64 times in a row once in 10¹⁹ messages."""


def main() -> int:
    outbox, receiver, look_again_s, *events = sys.argv[1:]
    alerts = AlertsConfig(
        (receiver,),
        allow_private=True,
        repeat_s=0,
        look_again_s=float(look_again_s),
        schedule=SCHEDULE,
        path=Path(outbox),
    )
    settings = parse_settings(["leak.finished-held.grace_s=0.3", "leak.finished-held.unseen_together_s=2"])
    config = ServiceConfig(tuple(events), port=0, alerts=alerts, settings=settings)
    return serve(LoadedConfig(config, {}), lambda app, query: None)


if __name__ == "__main__":
    sys.exit(main())
