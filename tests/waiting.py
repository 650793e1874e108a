"""Wait for other threads and processes, on cores that they share with other tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

PATIENCE_S: Final = 240.0
"""Only a test that fails waits so long. Shared cores have made others wait for a minute."""


def until(done: Callable[[], Any], what: str = "it does not come about", seconds: float = PATIENCE_S) -> Any:
    """Wait until `done` holds, and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < deadline, f"{what}: not after {seconds:g} s"
        time.sleep(0.02)
    return found
