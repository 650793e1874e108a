"""How far the reading of a large text is: one line on standard error while that is a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import BinaryIO, Final, TextIO

LARGE_BYTES: Final = 32 << 20
"""A smaller text takes a few seconds at most."""
REFRESH_S: Final = 0.5
LINES_BETWEEN_LOOKS: Final = 1 << 12


class ReadProgress:
    """Shows how much of `file` has been read, of a gzip its compressed bytes. Shows nothing for a text that is not
    large, or where `stream` is no terminal.
    """

    def __init__(self, name: str, file: BinaryIO, stream: TextIO | None = None) -> None:
        self._name = name
        self._file = file
        self._stream = stream if stream is not None else sys.stderr
        self._size = _size_of(file)
        self._is_shown = self._size >= LARGE_BYTES and self._stream is not None and self._stream.isatty()
        self._lines = 0
        self._width = 0
        self._next_s = time.monotonic() + REFRESH_S

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._width:
            self._write("")

    def count_line(self) -> None:
        """Note that a line was read, and refresh what is shown if it is time."""
        self._lines += 1
        if not self._is_shown or self._lines % LINES_BETWEEN_LOOKS:
            return
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + REFRESH_S
            share = min(self._file.tell() / self._size, 1.0)
            self._write(f"reading {self._name}: {share:.0%} of {self._size >> 20:,} MiB")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text:{self._width}}\r{text}")
        self._stream.flush()
        self._width = len(text)


def _size_of(file: BinaryIO) -> int:
    """Return the size of a file that is at its beginning, 0 if it has none."""
    if not file.seekable():
        return 0
    size = file.seek(0, 2)
    file.seek(0)
    return size
