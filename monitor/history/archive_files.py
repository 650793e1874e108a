"""The files of an archive as DuckDB reads them: ranges of objects, in blocks that are kept for a while."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Final

from fsspec import AbstractFileSystem

from kvscope.monitor.history.archive_store import Archive, ArchiveError

PROTOCOL: Final = "kvscope-archive"
READ_BYTES: Final = 2 << 20
"""One request. A row group's columns lie side by side, so that one block has many of the ranges that DuckDB reads."""
READS_KEPT: Final = 64
TAIL_BYTES: Final = 64 << 10
"""The end of a file, where Parquet keeps what is where, is a request of its own."""


class ArchiveFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files of an archive, read-only, by their paths below its prefix. `sizes` has every file that may be read.

    Reading ends `timeout_s` after this was made. `error` is the reason why reading failed, or empty.
    """

    protocol = PROTOCOL
    cachable = False

    def __init__(self, archive: Archive, sizes: dict[str, int], timeout_s: float) -> None:
        super().__init__()
        self.error = ""
        self._sizes = sizes
        self._until_s = time.monotonic() + timeout_s
        self._read_range = lru_cache(READS_KEPT)(archive.read)

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return what is known of a file. Raises FileNotFoundError."""
        name = self._strip_protocol(path)
        if name not in self._sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self._sizes[name], "type": "file"}

    def exists(self, path: str, **_options: Any) -> bool:
        """Whether the manifests name it."""
        return self._strip_protocol(path) in self._sizes

    def modified(self, path: str) -> datetime:
        """Return the same time for each file: none ever changes."""
        return datetime.fromtimestamp(0, UTC)

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> ArchivedRanges:
        if mode != "rb":
            raise PermissionError(f"{path} is in an archive, which is read only")
        info = self.info(path)
        return ArchivedRanges(info["name"], info["size"], self._read)

    def _read(self, name: str, start: int, end: int) -> bytes:
        if time.monotonic() > self._until_s:
            raise TimeoutError("the time of the query is over")
        try:
            found = self._read_range(name, start, end)
            if len(found) != end - start:
                raise ArchiveError(f"{name} is shorter than its manifest states")
        except ArchiveError as error:
            self.error = str(error)  # DuckDB wraps it in a traceback
            raise
        return found


class _Position(threading.local):
    at = 0


class ArchivedRanges(io.RawIOBase):
    """One file of an archive, open for reading. `read` returns bytes `start` up to `end` of a file.

    Each thread has a position of its own: DuckDB's threads share a file, and seek before each read.
    """

    def __init__(self, name: str, size: int, read: Callable[[str, int, int], bytes]) -> None:
        super().__init__()
        self._name = name
        self._size = size
        self._read = read
        self._position = _Position()

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return where the next read begins."""
        return self._position.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset."""
        self._position.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position.at, io.SEEK_END: self._size}[whence]
        return self._position.at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to so many bytes, all that are left without a size."""
        at = self._position.at
        end = self._size if size is None or size < 0 else min(self._size, at + size)
        parts = []
        while at < end:
            first, last = self._block(at)
            parts.append(self._read(self._name, first, last)[at - first : end - first])
            at = min(end, last)
        self._position.at = at
        return b"".join(parts)

    def _block(self, offset: int) -> tuple[int, int]:
        tail = max(0, self._size - TAIL_BYTES)
        if offset >= tail:
            return tail, self._size
        first = offset // READ_BYTES * READ_BYTES
        return first, min(tail, first + READ_BYTES)
