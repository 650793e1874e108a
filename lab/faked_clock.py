"""Wall clocks of other processes, which libfaketime moves. Their monotonic clocks stay right."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

LIBRARY: Final = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
"""The library, or None: apt-get install libfaketime."""
# libfaketime 0.9.10 turns an absolute sleep on the monotonic clock, which is how time.sleep works since Python 3.11,
# into EINVAL as soon as it leaves that clock alone.
SLEEP_BY_SELECT = """
import select
import time


def sleep(seconds):
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], seconds)


time.sleep = sleep
"""


class FakedClock:
    """The wall clock of the processes that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLEEP_BY_SELECT)
        self._offset = folder / "offset"
        self.move("+0")
        self.environment = {
            "LD_PRELOAD": str(LIBRARY),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_TIMESTAMP_FILE": str(self._offset),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", "")))),
        }

    def move(self, offset: str) -> None:
        """Set it off by `offset` from now on."""
        written = self._offset.with_suffix(".new")
        written.write_text(f"{offset}\n")
        written.rename(self._offset)
