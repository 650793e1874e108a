"""A service that archives, without its page and with short segments, in a process of its own that a test can kill.

python -m tests.history.archiving_process EVENTS DATA ARCHIVE
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from kvscope.monitor.history import segment_writer
from kvscope.monitor.service.service import Service, ServiceConfig


def main() -> None:
    events, data, archive = sys.argv[1:]
    segment_writer.SEGMENT_BYTES = 20_000  # type: ignore[misc]
    service = Service(ServiceConfig(events=(events,), data=Path(data), archive=archive))
    service.start()
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.pause()
    service.stop()


if __name__ == "__main__":
    main()
