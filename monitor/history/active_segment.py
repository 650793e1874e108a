"""An open segment: a journal's file, which may still grow."""

from __future__ import annotations

import contextlib
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec

from kvscope.monitor.events.journal import HEADER, MAX_PAYLOAD, RECORD, NotAJournal
from kvscope.monitor.events.wire import MAGIC, MAJOR, PREFIX, Batch, Frame, NewerVersion, NotAFrame, decode
from kvscope.monitor.history.observations import LETTER_OF_POINTS, Packed, packed
from kvscope.monitor.history.segment_index import Index
from kvscope.monitor.ledger.engine_ledger import Point

_Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class _BatchHead(msgspec.Struct, array_like=True):
    engine: str
    epoch: int
    sequence: _Int64
    first_step: int
    last_step: int
    wall_ns: _Int64
    mono_ns: _Int64


class _KeyframeHead(msgspec.Struct, array_like=True):
    engine: str
    epoch: int
    sequence: _Int64
    last_step: int
    wall_ns: _Int64
    mono_ns: _Int64


_KEYFRAME: Final = ord("K")
_HEADS: Final[dict[int, msgspec.msgpack.Decoder[_BatchHead] | msgspec.msgpack.Decoder[_KeyframeHead]]] = {
    ord("B"): msgspec.msgpack.Decoder(_BatchHead),
    _KEYFRAME: msgspec.msgpack.Decoder(_KeyframeHead),
}


class Opened:
    """The journal's file at `path`. Its index grows as the file does, and never reads a byte twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = Index()
        self.notes = array("q")
        """Offsets of what is kept there and is no frame: see notes.py."""
        self.point_times = array("q")
        """When each point of the ledger that is kept there was (wall ns), in order."""
        self._point_offsets = array("q")
        self.bytes_lost = 0
        """At the end of the file, or behind damage: no whole records."""
        self._read = 0

    def refresh(self) -> None:
        """Take what has come to the file into the index. Raises NotAJournal for another kind of file, NewerVersion for
        what this release cannot read, and FileNotFoundError if it has been closed since.
        """
        size = self.path.stat().st_size
        if self._read + self.bytes_lost == size:
            return
        if not self._read:
            self._read = self._read_header()
        for offset, payload in _active_records(self.path, self._read) if self._read else ():
            self._read = offset + RECORD.size + len(payload)
            self._enter(offset, payload)
        self.bytes_lost = max(0, size - self._read)

    def frames(self, first: int, end: int) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from number `first` up to, not including, `end`, each with its number."""
        places = self.index.place[first:end]
        numbers = dict(zip(places, range(first, end), strict=False))
        for offset, payload in _active_records(self.path, places[0]) if places else ():
            if offset > places[-1]:
                return
            if offset in numbers:
                # One whose columns do not add up is left out: the next batch shows that it is missing.
                with contextlib.suppress(NotAFrame):
                    frame = decode(payload)
                    if frame is not None:
                        yield numbers[offset], frame

    def texts(self) -> Iterator[tuple[int, int, dict[int, str]]]:
        """Yield the texts of each batch, by the number of the request that each is about, with its time and epoch."""
        for number, frame in self.frames(0, len(self.index)):
            if isinstance(frame, Batch) and frame.texts:
                yield self.index.wall[number], frame.epoch, frame.texts

    def kept_notes(self) -> Iterator[Packed]:
        """Yield the notes beside the frames."""
        if not self.notes:
            return
        with self.path.open("rb") as file:
            for offset in self.notes[:]:
                note = _note_at(file, offset)
                if note is not None:
                    yield note

    def points(self, rows: Sequence[int]) -> Iterator[Point]:
        """Yield the points at these indices of `point_times`."""
        with self.path.open("rb") as file:
            for row in rows:
                note = _note_at(file, self._point_offsets[row])
                if note is not None and isinstance(point := note.note(), Point):
                    yield point

    def _read_header(self) -> int:
        with self.path.open("rb") as file:
            header = file.read(len(HEADER))
        if not HEADER.startswith(header):
            raise NotAJournal(f"{self.path} is not a segment of a kvscope journal: it begins with {header!r}")
        return len(header) if len(header) == len(HEADER) else 0

    def _enter(self, offset: int, payload: bytes) -> None:
        if payload[:2] != MAGIC or len(payload) < PREFIX:
            return
        if payload[2] > MAJOR:
            raise NewerVersion(f"{self.path} is of version {payload[2]}.{payload[3]} of the event contract: upgrade")
        decoder = _HEADS.get(payload[4])
        if decoder is None:
            self.notes.append(offset)
            note = packed(payload)
            if note is not None and note.letter == LETTER_OF_POINTS:
                if not self.point_times:
                    self._begin_with(note)
                self.point_times.append(note.at_ns)
                self._point_offsets.append(offset)
            return
        try:
            head = decoder.decode(memoryview(payload)[PREFIX:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        self.index.engine = self.index.engine or head.engine
        self.index.add(payload[4] == _KEYFRAME, head.sequence, head.wall_ns, head.mono_ns, offset)

    def _begin_with(self, first: Packed) -> None:
        """Take the time at which the service had its engine then from the first point."""
        point = first.note()
        if isinstance(point, Point) and point.position is not None:
            row = bisect_left(self.index.sequence, point.position.sequence)
            if row < len(self.index):
                self.index.begin_no_earlier(self.index.wall[0] + point.at_ns - self.index.wall[row])


def _note_at(file: BinaryIO, offset: int) -> Packed | None:
    file.seek(offset)
    length, _ = RECORD.unpack(file.read(RECORD.size))
    return packed(file.read(length))


def _active_records(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the whole records of a journal's file from `offset` on, each with its own offset."""
    with path.open("rb") as file:
        file.seek(offset)
        while len(record := file.read(RECORD.size)) == RECORD.size:
            length, checksum = RECORD.unpack(record)
            payload = file.read(length) if length <= MAX_PAYLOAD else b""
            if not 0 < length == len(payload) or zlib.crc32(payload) != checksum:
                return
            yield offset, payload
            offset += RECORD.size + length
