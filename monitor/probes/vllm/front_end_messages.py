"""Reports of vLLM's API server processes to the engine's process: a PUSH socket in each, one PULL socket there.

Messages are msgpack arrays of at most REQUEST_BYTES. Both ends are on one machine and share its monotonic clock.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import tempfile
import time
from enum import IntEnum
from pathlib import Path
from typing import Final

import msgspec

INBOX_PREFIX: Final = "kvscope-front-end-"
STALE_S: Final = 60
"""A socket this old accepts connections, if the process that made it is there: it listens at once."""


class FrontEndKind(IntEnum):
    """An event of a request in the front end."""

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
    """Return where the engine that publishes at `events` takes reports, or an empty string where its port is picked at
    random.
    """
    if events.endswith(":*"):
        return ""
    name = re.sub(r"[^0-9A-Za-z.]+", "-", events.partition("://")[2])
    return f"ipc://{Path(tempfile.gettempdir()) / f'{INBOX_PREFIX}{name}-{os.getuid()}'}"


def remove_stale_inboxes(now_s: float | None = None) -> list[Path]:
    """Remove this user's sockets of engines that were killed, and return them.

    A killed process cannot remove its socket. The operating system refuses connections to it from then on, whatever the
    process id is used for by now. now_s: wall time, for tests.
    """
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{INBOX_PREFIX}*-{os.getuid()}"):
        with contextlib.suppress(OSError):  # another engine removes it too
            found = path.lstat()
            old = (time.time() if now_s is None else now_s) - found.st_mtime > STALE_S
            if stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid() and old and _refuses(path):
                path.unlink()
                removed.append(path)
    return removed


def _refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full queue of connections is no refusal
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False
