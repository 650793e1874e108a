"""Readers of segments: an open one is a journal's file, which may still grow, a closed one is sealed_segment.py.

They stay readable while the service closes, deletes or damages what they read. Damage takes no more than its own
frames: it is logged, counted and skipped. A deleted segment reads as empty.
"""

from __future__ import annotations

import contextlib
import logging
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final, TypeVar

import msgspec

from ..contract.journal import HEADER, MAX_PAYLOAD, RECORD, NotAJournal
from ..contract.wire import MAGIC, MAJOR, PREFIX, Batch, Frame, NewerVersion, NotAFrame, decode
from ..ledger.engine_ledger import Point
from .segment_files import (
    LETTER_OF_POINTS,
    ClosedSegment,
    HistorySegment,
    Index,
    OpenSegment,
    Packed,
    closed_form,
    packed,
)

if TYPE_CHECKING:
    from .sealed_segment import Closed

logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")
DamagedSegments = dict[Path, int]
"""The bytes on disk of each closed segment that was found damaged."""
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
        """Offsets of what is kept there and is no frame: see kvscope.monitor.history.segment_files."""
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
        """See SegmentReader."""
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


# -------------------------------------------------------------------- a reader that survives


class SegmentReader:
    """Reads a segment, open or closed, as far as it is intact. Empty once it is deleted.

    A segment that was open is read in its closed form from when it is closed. Both forms number frames and points
    alike, and an open file stays readable, so a read is repeated only as a whole. Damage is entered in `damage`.
    """

    def __init__(self, segment: HistorySegment, damage: DamagedSegments) -> None:
        self._segment = segment
        self._damage = damage
        self._is_open = isinstance(segment, OpenSegment)
        self._form = Opened(segment.path) if isinstance(segment, OpenSegment) else _closed(segment)

    @property
    def index(self) -> Index:
        """The index of its frames, empty if that cannot be read."""
        return next(self._read(lambda form: iter((form.index,))), Index())

    @property
    def point_times(self) -> array[int]:
        """When each point of the ledger that is kept there was (wall ns), in order. Empty if that cannot be read."""
        return next(self._read(lambda form: iter((form.point_times,))), array("q"))

    @property
    def bytes_lost(self) -> int:
        """Bytes cut off by a crash, or all bytes of a closed segment that is damaged."""
        if isinstance(self._form, Opened) and self._is_open:
            return self._form.bytes_lost
        return self._damage.get(self._segment.path, 0)

    def refresh(self) -> None:
        """Take in what has come since."""
        if isinstance(self._form, Opened) and self._is_open:
            try:
                self._form.refresh()
            except FileNotFoundError:
                self._follow()

    def frames(self, first: int, end: int) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from number `first` up to, not including, `end`, each with its number."""
        return self._read(lambda form: form.frames(first, end))

    def texts(self) -> Iterator[tuple[int, int, dict[int, str]]]:
        """Yield the texts of each batch, by the number of the request that each is about, with its time and epoch."""
        return self._read(lambda form: form.texts())

    def kept_notes(self) -> Iterator[Packed]:
        """Yield the notes beside the frames."""
        return self._read(lambda form: form.kept_notes())

    def points(self, rows: Sequence[int]) -> Iterator[Point]:
        """Yield the points at these indices of `point_times`."""
        return self._read(lambda form: form.points(rows))

    def _read(self, read: Callable[[Opened | Closed], Iterator[_Item]]) -> Iterator[_Item]:
        """Yield what comes until the damage. Log it once: damaged Parquet raises any error in pyarrow and numpy."""
        if self._is_open:
            try:
                yield from read(self._form)
                return
            except FileNotFoundError:
                self._follow()
        try:
            yield from read(self._form)
        except Exception as error:
            path = self._segment.path
            if path in self._damage:
                return
            try:
                self._damage[path] = sum(file.stat().st_size for file in path.iterdir())
            except FileNotFoundError:  # retention has deleted the segment since
                return
            logger.warning("%s is damaged and is skipped (%s)", path, type(error).__name__)

    def _follow(self) -> None:
        """Go on with the closed form of a journal that is gone, or with nothing if that is gone, too."""
        self._is_open = False
        closed = closed_form(self._segment)
        self._form = Opened(self._segment.path) if closed is None else _closed(closed)
        self._segment = closed or self._segment


def _closed(segment: ClosedSegment) -> Closed:
    from .sealed_segment import Closed  # a recording is read without what reads Parquet

    return Closed(segment)
