"""`monitor serve` with the times of a chaos run: retries and resumption within seconds instead of minutes.

python -m kvscope.lab.chaos.monitor_process HOST PORT TOKEN DATA RECEIVER PAGE ENDPOINT…

PAGE is a metrics page, or empty. The service, its history, outbox and web server are those of `monitor serve`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.outputs.alerting.alerting import AlertsConfig
from kvscope.monitor.service.service import ServiceConfig
from kvscope.monitor.service.web_server import LoadedConfig, serve

CHAOS_SCHEDULE: Final = (0.0,) + (0.5,) * 400
LOOK_AGAIN_S: Final = 10.0


def main() -> int:
    """Serve until killed; the exit code."""
    host, port, token, data, receiver, page, *events = sys.argv[1:]
    alerts = AlertsConfig(
        (receiver,),
        allow_private=True,
        repeat_s=0,
        look_again_s=LOOK_AGAIN_S,
        schedule=CHAOS_SCHEDULE,
        path=Path(data) / "alerts.sqlite",
    )
    config = ServiceConfig(
        events=tuple(events),
        metrics=(page,) if page else (),
        host=host,
        port=int(port),
        token=token,
        alerts=alerts,
        data=Path(data),
        settings=parse_settings(["leak.finished-held.grace_s=0.3", "leak.finished-held.unseen_together_s=2"]),
    )
    try:
        return serve(LoadedConfig(config, {}), lambda app, query: None)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
