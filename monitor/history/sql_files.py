"""Files as DuckDB reads them through fsspec: those of the history, and the objects of an archive in ranges.

They cannot be written: there is no code that opens one for that.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

from fsspec import AbstractFileSystem

from .archive_store import Archive, ArchiveError

HISTORY_PROTOCOL: Final = "kvscope-history"
NO_WAIT: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Never wait for the writer of a FIFO that has taken a file's place since."""


class _Position(threading.local):
    at = 0


class RangeReader(io.RawIOBase):
    """One file of `size` bytes, open for reading. `read_range` returns bytes `start` up to `end`, `done` ends that.

    Each thread has a position of its own: DuckDB's threads share a file, and seek before each read.
    """

    def __init__(
        self, size: int, read_range: Callable[[int, int], bytes], done: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.size = size
        self._read_range = read_range
        self._done = done
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
        self._position.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position.at, io.SEEK_END: self.size}[whence]
        return self._position.at

    def read(self, size: int | None = -1) -> bytes:
        """Read up to so many bytes, all that are left without a size."""
        at = self._position.at
        end = self.size if size is None or size < 0 else min(self.size, at + size)
        found = self._read_range(at, end) if at < end else b""
        self._position.at = at + len(found)
        return found

    def close(self) -> None:
        """Give back what the file takes."""
        if not self.closed:
            self._done()
        super().close()


class ReadOnlyFiles(AbstractFileSystem):  # type: ignore[misc]
    """The files that `sizes` names, and no others."""

    cachable = False

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.sizes = sizes

    def info(self, path: str, **_options: Any) -> dict[str, Any]:
        """Return what is known of a file. Raises FileNotFoundError."""
        name = self._strip_protocol(path)
        if name not in self.sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self.sizes[name], "type": "file"}

    def modified(self, path: str) -> datetime:
        """Return the same time for each file: none ever changes."""
        return datetime.fromtimestamp(0, UTC)

    def open_range(self, name: str, size: int) -> RangeReader:
        """Open a file for reading."""
        raise NotImplementedError

    def _open(self, path: str, mode: str = "rb", **_options: Any) -> RangeReader:
        if mode != "rb":
            raise PermissionError(f"{path} is read only")
        info = self.info(path)
        return self.open_range(info["name"], info["size"])


class LocalFiles(ReadOnlyFiles):
    """The Parquet files of folders of this machine, each as `NUMBER/NAME` so that a query learns no path."""

    protocol = HISTORY_PROTOCOL

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}
        self._sizes: dict[str, int] = {}
        self._folders = 0
        super().__init__(self._sizes)

    def folder(self, path: Path) -> tuple[str, list[Path]]:
        """Add a folder. Return its address, and its files that are left out because they are no regular files.

        Raises FileNotFoundError.
        """
        irregular = []
        for entry in os.scandir(path):
            name = f"{self._folders}/{entry.name}"
            if not entry.name.endswith(".parquet"):
                continue
            if entry.is_file(follow_symlinks=False):
                self.paths[name] = Path(entry.path)
                self._sizes[name] = entry.stat(follow_symlinks=False).st_size
            else:
                irregular.append(Path(entry.path))
        self._folders += 1
        return f"{HISTORY_PROTOCOL}://{self._folders - 1}", irregular

    def open_range(self, name: str, size: int) -> RangeReader:
        """Open a file for reading."""
        fd = os.open(self.paths[name], NO_WAIT)
        return RangeReader(size, lambda start, end: os.pread(fd, end - start, start), partial(os.close, fd))


# -------------------------------------------------------------------- an archive


PROTOCOL: Final = "kvscope-archive"
READ_BYTES: Final = 2 << 20
"""One request. A row group's columns lie side by side, so that one block has many of the ranges that DuckDB reads."""
READS_KEPT: Final = 64
TAIL_BYTES: Final = 64 << 10
"""The end of a file, where Parquet keeps what is where, is a request of its own."""


class ArchiveFiles(ReadOnlyFiles):
    """The files of an archive by their paths below its prefix. `error` is why reading failed, or empty."""

    protocol = PROTOCOL

    def __init__(self, archive: Archive, sizes: dict[str, int]) -> None:
        super().__init__(sizes)
        self.error = ""
        self._read_kept = lru_cache(READS_KEPT)(archive.read)

    def open_range(self, name: str, size: int) -> RangeReader:
        """Open a file for reading."""
        return RangeReader(size, partial(self._read, name, size))

    def _read(self, name: str, size: int, start: int, end: int) -> bytes:
        """Read bytes `start` up to `end`, from the blocks that hold them."""
        parts = []
        while start < end:
            first, last = _block(start, size)
            parts.append(self._read_block(name, first, last)[start - first : end - first])
            start = min(end, last)
        return b"".join(parts)

    def _read_block(self, name: str, start: int, end: int) -> bytes:
        try:
            found = self._read_kept(name, start, end)
            if len(found) != end - start:
                raise ArchiveError(f"{name} is shorter than its manifest states")
        except ArchiveError as error:
            self.error = str(error)  # DuckDB wraps it in a traceback
            raise
        return found


def _block(offset: int, size: int) -> tuple[int, int]:
    tail = max(0, size - TAIL_BYTES)
    if offset >= tail:
        return tail, size
    first = offset // READ_BYTES * READ_BYTES
    return first, min(tail, first + READ_BYTES)
