"""What vLLM's API server processes report to the engine's process: a PUSH socket in each, one PULL socket there.

Messages are msgpack arrays of at most REQUEST_BYTES. Both ends are on one machine and share its monotonic clock.
"""

from __future__ import annotations

import os
import re
import tempfile
from enum import IntEnum
from pathlib import Path

import msgspec


class FrontEndKind(IntEnum):
    """What became of a request in the front end."""

    RECEIVED = 1
    CLIENT_GONE = 2
    ENDED = 3


class FrontEndMessage(msgspec.Struct, frozen=True, array_like=True):
    """One report. `request_id` is vLLM's own id, which the scheduler has too. `at_ns` is monotonic."""

    kind: FrontEndKind
    request_id: str
    at_ns: int
    prompt_tokens: int = 0


def front_end_endpoint(events: str) -> str:
    """Return where the engine that publishes at `events` takes reports; empty where its port is picked at random."""
    if events.endswith(":*"):
        return ""
    name = re.sub(r"[^0-9A-Za-z.]+", "-", events.partition("://")[2])
    return f"ipc://{Path(tempfile.gettempdir()) / f'kvscope-front-end-{name}-{os.getuid()}'}"
