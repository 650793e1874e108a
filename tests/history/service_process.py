"""A service without its page, in a process of its own that a test can kill.

python -m tests.history.service_process EVENTS DATA
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kvscope.monitor.service.service import Service, ServiceConfig


def main() -> None:
    events, data = sys.argv[1:]
    service = Service(ServiceConfig(events=(events,), data=Path(data)))
    service.start()
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.pause()
    service.stop()


if __name__ == "__main__":
    main()
