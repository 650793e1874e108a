"""Segments of a history: where they lie, the index of their frames, and the notes beside these.

    DATA/history/ENGINE/EPOCH-SEQUENCE.kvj                      open: as kvscope.monitor.contract.journal writes it
    DATA/history/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO/*.parquet    closed: see sealed_segment.py; FROM and TO are wall ns

A directory appears under a closed segment's name only when all in it is written. Then its journal goes. If both are
there, a crash came between the two, and the journal counts no more. A plain recording is a directory of open segments.
"""

from __future__ import annotations

import contextlib
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from ..contract import journal
from ..contract.samples import OBSERVED_DECODERS, OBSERVED_LETTERS, Observed, journal_payload
from ..contract.wire import ADDED_BY_SOURCE, PREFIX, Keyframe
from ..ledger import keyframe_codec
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.stream_clock import JUMP_NS, StreamClock

_CLOSED: Final = re.compile(r"(\d{20})-(\d{15})-(\d{20})-(\d{20})")


class OpenSegment(NamedTuple):
    """A journal's file."""

    epoch: int
    first_sequence: int
    path: Path


class ClosedSegment(NamedTuple):
    """A directory of Parquet files, by its name: it covers the time from `from_ns` to `to_ns`."""

    epoch: int
    first_sequence: int
    path: Path
    from_ns: int
    to_ns: int

    @property
    def stem(self) -> str:
        """The name of the journal that it was."""
        return stem_of(self.epoch, self.first_sequence)


HistorySegment = OpenSegment | ClosedSegment


def directory_of(history: Path, engine: str) -> Path:
    """Return the directory of an engine's history."""
    return history / quote(engine, safe="@:")


def engine_in(directory: Path) -> str:
    """Return the engine whose directory it is."""
    return unquote(directory.name)


def stem_of(epoch: int, first_sequence: int) -> str:
    """Return the name of an open segment without its suffix, which also begins the closed one's name."""
    return f"{epoch:020d}-{max(first_sequence, 0):015d}"


def name_of_closed(epoch: int, first_sequence: int, from_ns: int, to_ns: int) -> str:
    """Return the name of a closed segment's directory."""
    return f"{stem_of(epoch, first_sequence)}-{from_ns:020d}-{to_ns:020d}"


def history_segments(directory: Path) -> list[HistorySegment]:
    """Return an engine's segments in order of time, without half-written ones or leftovers of a crash."""
    opened = journal.journal_segments(directory) if directory.is_dir() else []
    # In this order: what is closed between the two looks is seen twice rather than not at all.
    closed = sorted(closed_segments(directory))
    stems = {segment.stem for segment in closed}
    still_open = [OpenSegment(*segment) for segment in opened if segment.path.stem not in stems]
    return sorted([*closed, *still_open], key=lambda segment: segment[:2])


def closed_segments(directory: Path) -> Iterator[ClosedSegment]:
    """Yield the closed ones, in no order."""
    for day in directory.iterdir() if directory.is_dir() else ():
        if not day.is_dir() or day.name.startswith("."):
            continue
        with contextlib.suppress(FileNotFoundError):  # retention has deleted the last segment of that day since
            for path in day.iterdir():
                match = _CLOSED.fullmatch(path.name)
                if match:
                    yield ClosedSegment(int(match[1]), int(match[2]), path, int(match[3]), int(match[4]))


def closed_form(segment: HistorySegment) -> ClosedSegment | None:
    """Return what a journal has become that is not there any more, or None if that was deleted too."""
    return next((closed for closed in closed_segments(segment.path.parent) if closed[:2] == segment[:2]), None)


# -------------------------------------------------------------------- the index


MAX_NS: Final = (1 << 63) - 1


class Index:
    """A segment's frames, by number. `wall` and `sequence` are the highest until each, so that they never fall.

    began_ns: when the first frame was, if not earlier than its own clock shows.
    """

    def __init__(self, began_ns: int = 0) -> None:
        self._began_ns = began_ns
        self.engine = ""
        self._clock = StreamClock()
        self.wall = array("q")
        self.last_wall_ns = 0
        """The last frame's time by the clock of who sent it, however that was set."""
        self.sequence = array("q")
        self.place = array("q")
        """The frame's offset in a journal, or its row in a closed segment."""
        self.anchors: list[int] = []
        """The frames from which the state is known without what came before."""

    def __len__(self) -> int:
        return len(self.wall)

    def add(self, is_keyframe: bool, sequence: int, wall_ns: int, mono_ns: int, place: int) -> None:
        """One more frame."""
        if is_keyframe or sequence == 0:
            self.anchors.append(len(self.wall))
        self.last_wall_ns = wall_ns
        last_ns = self.wall[-1] if self.wall else max(wall_ns, self._began_ns)
        if sequence == ADDED_BY_SOURCE:
            at_ns = self._clock.observed(wall_ns, mono_ns, last_ns)
        else:
            at_ns = self._clock.frame(wall_ns, mono_ns, last_ns, last_ns, (0, sequence))
        self.wall.append(min(max(at_ns, last_ns), MAX_NS))
        self.sequence.append(max(sequence, self.sequence[-1]) if self.sequence else sequence)
        self.place.append(place)

    def begin_no_earlier(self, at_ns: int) -> None:
        """Let the first frame be at `at_ns`, if it would be earlier: of an engine that started again with an earlier
        clock, and whose time goes on from where its predecessor's was.
        """
        by_ns = at_ns - self.wall[0] if self.wall else 0
        if by_ns > JUMP_NS:
            self._clock.move(by_ns)
            self.wall = array("q", [min(wall_ns + by_ns, MAX_NS) for wall_ns in self.wall])


# -------------------------------------------------------------------- notes


Note = Point | Observed

LETTER_OF_POINTS: Final = "P"
_POINT_DECODER: Final[msgspec.msgpack.Decoder[Point]] = msgspec.msgpack.Decoder(Point)


class Packed(NamedTuple):
    """A note as bytes, by its letter, with `at_ns` 0 if it has no time."""

    letter: str
    at_ns: int
    body: bytes

    def note(self) -> Note | None:
        """Return the decoded note, or None for one of another release."""
        decoder = _POINT_DECODER if self.letter == LETTER_OF_POINTS else OBSERVED_DECODERS.get(self.letter)
        try:
            return decoder.decode(self.body) if decoder is not None else None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None


def pack(note: Note) -> bytes:
    """Return the note as bytes, to be read by its letter."""
    return msgspec.msgpack.encode(note)


def encode_note(note: Note) -> bytes:
    """Return the note as a journal's payload."""
    letter = LETTER_OF_POINTS if isinstance(note, Point) else OBSERVED_LETTERS[type(note)]
    return journal_payload(letter, pack(note))


def packed(payload: bytes) -> Packed | None:
    """Return the note in a journal's payload, or None for anything else, or an invalid time."""
    found = Packed(chr(payload[PREFIX - 1]), 0, payload[PREFIX:])
    note = found.note()
    at_ns = note.at_ns or 0 if note is not None else -1
    return found._replace(at_ns=at_ns) if 0 <= at_ns < 1 << 63 else None


# -------------------------------------------------------------------- keyframes


def keyframe_of(ledger: EngineLedger) -> Keyframe | None:
    """Return the ledger's state after the last batch that it took in, or None if the state is not known yet.

    Where events were lost and an audit is putting it right (`damaged`), who begins from it does not go on as the ledger
    does: how far the audit has come is in no keyframe.
    """
    if not ledger.ready:
        return None
    wall_minus_mono = ledger.wall(1) - 1
    return Keyframe(
        ledger.engine,
        ledger.epoch,
        ledger.sequence,
        ledger.state.last_step,
        ledger.last_received_ns,
        ledger.last_received_ns - wall_minus_mono,
        ledger.state.damaged,
        keyframe_codec.dump_state(ledger.state),
    )


def sound_keyframe_of(ledger: EngineLedger) -> Keyframe | None:
    """Return a keyframe from which a reader continues as the ledger does, or None if there is none now."""
    return None if ledger.state.damaged else keyframe_of(ledger)
