"""Makes allocators return what threads free, so that memory follows what ledgers keep and not what passed through.

The service has more than 80 threads, and much passes through it: pages, answers, segments that are closed. Without
this, the C library gives most threads an arena of their own and holds back tens of megabytes of what was freed, and
Arrow's own allocator keeps what each thread freed: 60 MiB after a few segments.

Nothing here may import pyarrow: Arrow chooses its allocator as it is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from typing import Final

M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
M_ARENA_MAX: Final = -8
"""glibc's names for them, in malloc.h."""
MOST_ARENAS: Final = 2
MAPPED_FROM_BYTES: Final = 256 << 10
"""What is this large has a mapping of its own, and is returned as it is freed. glibc raises its own threshold, and how
much it holds back, to what was freed last: up to 32 and 64 MiB.
"""
HELD_BACK_BYTES: Final = 1 << 20
TRIM_EVERY_S: Final = 60.0


def use_few_allocators() -> None:
    """Let all threads share MOST_ARENAS arenas that hold back little, where the C library is glibc, and let Arrow
    allocate there too.

    Arenas that exist already stay, and so does Arrow's allocator: call it before threads are started and pyarrow is
    imported. Whoever sets ARROW_DEFAULT_MEMORY_POOL chooses otherwise.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_ARENA_MAX, MOST_ARENAS)
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, HELD_BACK_BYTES)
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


class HeapTrimmer:
    """Returns free pages within the heaps to the operating system, once a minute.

    Memory freed below what is still in use stays with the C library otherwise: a little more after each page.
    """

    def __init__(self) -> None:
        self._trimmed_s = time.monotonic()

    def check(self) -> None:
        """Trim the heaps where a minute has passed."""
        now_s = time.monotonic()
        if now_s - self._trimmed_s >= TRIM_EVERY_S:
            self._trimmed_s = now_s
            trim_heaps()


def trim_heaps() -> None:
    """Return free memory of the C library to the operating system, where it is glibc."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
