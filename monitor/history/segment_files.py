"""Where history lies: an engine's segments, the open ones journals and the closed ones Parquet.

    DATA/history/ENGINE/EPOCH-SEQUENCE.kvj                          open: as kvscope.monitor.events.journal writes it
    DATA/history/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO/*.parquet        closed: see columns.py; FROM and TO are wall ns

A directory appears under a closed segment's name only when all in it is written. Then its journal goes. If both are
there, a crash came between the two, and the journal counts no more. A plain recording is a directory of open segments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote, unquote

from kvscope.monitor.events import journal

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
        for path in day.iterdir():
            match = _CLOSED.fullmatch(path.name)
            if match:
                yield ClosedSegment(int(match[1]), int(match[2]), path, int(match[3]), int(match[4]))
