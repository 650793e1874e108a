"""A journal: a directory of segments that keeps frames as they were sent, readable after a crash at any byte.

A segment is a file `EPOCH-SEQUENCE.kvj`, named for the first batch it may hold so that names sort in time. It begins
with the eight bytes `KVSCOPE` and 1, then has records: length (uint32), CRC-32 of the payload (uint32), the payload (a
frame, see wire.py), all little-endian. Every segment begins with a keyframe if one can be had, so each can be read on
its own. A record cut short or damaged ends its segment, but the records before it stand. So does a record of length 0:
a power cut leaves zeros at the end of a file.

A recording is a journal, and so are an engine's own record of itself and the open segments of the service.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from .event_log import Clock
from .wire import ContractError

HEADER: Final = b"KVSCOPE\x01"
RECORD: Final = struct.Struct("<II")
SUFFIX: Final = ".kvj"
MAX_PAYLOAD: Final = 1 << 30
_NAME: Final = re.compile(r"(\d{20})-(\d{15})\.kvj")


class NotAJournal(ContractError):
    """The directory holds no segment, or a file in it is not one."""


class JournalSegment(NamedTuple):
    """A file of a journal, by its name."""

    epoch: int
    first_sequence: int
    path: Path


class JournalWriter:
    """Appends frames to a journal in `directory`, which is made if missing.

    A new segment begins after `segment_bytes` or `segment_s`, with the result of `keyframe()`, unless that is None. The
    oldest segments go when the journal is larger than `keep_bytes` (0: keep all). Each append reaches the operating
    system before it returns, so a killed process loses nothing it appended.
    """

    def __init__(
        self,
        directory: Path,
        epoch: int,
        keyframe: Callable[[], bytes | None] = lambda: None,
        *,
        segment_bytes: int = 64 << 20,
        segment_s: float = 600.0,
        keep_bytes: int = 0,
        clock: Clock = time,
    ) -> None:
        self.directory = directory
        self.epoch = epoch
        self.segment_bytes = segment_bytes
        self.segment_s = segment_s
        self.keep_bytes = keep_bytes
        self._keyframe = keyframe
        self._clock = clock
        self._fd = -1
        self._path = directory
        self._size = 0
        self._opened_ns = 0
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def size(self) -> int:
        """Bytes of the open segment."""
        return self._size

    @property
    def is_gone(self) -> bool:
        """Whether the open segment was deleted or moved: what is appended to it is lost."""
        if self._fd < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def append(self, payload: bytes, sequence: int) -> None:
        """Keep one frame. `sequence` is its batch's (or the last one's, for records that a source adds)."""
        age_s = (self._clock.monotonic_ns() - self._opened_ns) / 1e9
        if self._fd < 0 or self._size >= self.segment_bytes or age_s >= self.segment_s:
            self._open(sequence)
        self._write(payload)

    def close(self) -> None:
        """Finish the open segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, sequence: int) -> None:
        self.close()
        self._path = self.directory / f"{self.epoch:020d}-{max(sequence, 0):015d}{SUFFIX}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._opened_ns = self._clock.monotonic_ns()
        if not self._size:
            self._size += os.write(self._fd, HEADER)
        keyframe = self._keyframe()
        if keyframe is not None:
            self._write(keyframe)
        if self.keep_bytes:
            self._drop_oldest()

    def _write(self, payload: bytes) -> None:
        record = RECORD.pack(len(payload), zlib.crc32(payload)) + payload
        view = memoryview(record)
        while view:
            view = view[os.write(self._fd, view) :]
        self._size += len(record)

    def _drop_oldest(self) -> None:
        kept = 0
        for segment in reversed(journal_segments(self.directory)):
            kept += segment.path.stat().st_size
            if kept > self.keep_bytes and segment.path.stat().st_size < kept:
                segment.path.unlink()


def journal_segments(directory: Path) -> list[JournalSegment]:
    """Return the journal's segments in order of time. Files of other names are ignored."""
    found = []
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append(JournalSegment(int(match[1]), int(match[2]), path))
    return sorted(found)


def read_segment(path: Path) -> Iterator[bytes]:
    """Yield the payloads in one segment, until one that was cut short or damaged: see `tail_lost` and `damaged_at`.

    Raises NotAJournal if the file does not begin as a segment does.
    """
    with path.open("rb") as file:
        header = file.read(len(HEADER))
        if header != HEADER:
            if HEADER.startswith(header):
                return  # the crash came before the header was whole
            raise NotAJournal(f"{path} is not a segment of a kvscope journal: it begins with {header!r}")
        while (payload := _next_payload(file)) is not None:
            yield payload


def _next_payload(file: BinaryIO) -> bytes | None:
    """Return the payload of the next record, or None if no whole record follows."""
    record = file.read(RECORD.size)
    if len(record) < RECORD.size:
        return None
    length, checksum = RECORD.unpack(record)
    payload = file.read(length) if length <= MAX_PAYLOAD else b""
    return payload if 0 < length == len(payload) and zlib.crc32(payload) == checksum else None


def damaged_at(path: Path) -> int | None:
    """Return the byte at which the first damaged record of a segment begins.

    None if there is none. A writer that was killed leaves a record that ends too early, and a power cut zeros: neither
    is damage.
    """
    whole = len(HEADER) + sum(RECORD.size + len(payload) for payload in read_segment(path))
    with path.open("rb") as file:
        file.seek(whole)
        record = file.read(RECORD.size)
        if len(record) < RECORD.size:
            return None
        length, _ = RECORD.unpack(record)
        if not length and _is_zero_to_its_end(file):
            return None
        is_all_there = length > MAX_PAYLOAD or len(file.read(length)) == length
        return whole if is_all_there else None


def _is_zero_to_its_end(file: BinaryIO) -> bool:
    while piece := file.read(1 << 20):
        if piece.count(0) != len(piece):
            return False
    return True


def tail_lost(path: Path) -> int:
    """Return how many bytes at the end of a segment are not whole records: 0 unless a crash or damage cut it short."""
    whole = sum(RECORD.size + len(payload) for payload in read_segment(path))
    size = path.stat().st_size
    return size - whole - len(HEADER) if size > len(HEADER) else size % len(HEADER)


def read(directory: Path) -> Iterator[bytes]:
    """Yield every payload of a journal in order. Raises NotAJournal if there is no segment."""
    found = journal_segments(directory) if directory.is_dir() else []
    if not found:
        raise NotAJournal(f"{directory} holds no recording: no file in it is named EPOCH-SEQUENCE{SUFFIX}")
    for segment in found:
        yield from read_segment(segment.path)


def read_since(directory: Path, epoch: int, sequence: int) -> Iterator[bytes]:
    """Yield payloads of one epoch from the last segment that begins at or before `sequence` on."""
    of_epoch = [segment for segment in journal_segments(directory) if segment.epoch == epoch]
    first = max((i for i, segment in enumerate(of_epoch) if segment.first_sequence <= sequence), default=None)
    if first is not None:
        for segment in of_epoch[first:]:
            yield from read_segment(segment.path)
