"""A closed segment from which damage takes no more than its own frames: it is logged, counted and skipped."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from kvscope.monitor.events.wire import Frame
from kvscope.monitor.history.observations import Packed
from kvscope.monitor.history.segment_index import Index
from kvscope.monitor.ledger.engine_ledger import Point

logger = logging.getLogger(__name__)
DamagedSegments = dict[Path, int]
"""The bytes on disk of each closed segment that was found damaged."""


class SegmentReader(Protocol):
    """A readable segment, open or closed."""

    path: Path

    @property
    def index(self) -> Index:
        """The index of its frames."""

    @property
    def point_times(self) -> array[int]:
        """When each point of the ledger that is kept there was (wall ns), in order."""

    @property
    def bytes_lost(self) -> int:
        """Bytes cut off by a crash or damage."""

    def refresh(self) -> None:
        """Take in what has come since. Raises FileNotFoundError if it is not there any more."""

    def frames(self, first: int, end: int) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from number `first` up to, not including, `end`, each with its number."""

    def texts(self) -> Iterator[tuple[int, int, dict[int, str]]]:
        """Yield the texts of each batch, by the number of the request that each is about, with its time and epoch."""

    def kept_notes(self) -> Iterator[Packed]:
        """Yield the notes beside the frames."""

    def points(self, rows: Sequence[int]) -> Iterator[Point]:
        """Yield the points at these indices of `point_times`."""


class GuardedSegment:
    """Reads a closed segment as far as it is intact, and enters it in `damage` otherwise.

    FileNotFoundError passes: retention has dropped the segment since.
    """

    def __init__(self, reader: SegmentReader, damage: DamagedSegments) -> None:
        self.path = reader.path
        self._reader = reader
        self._damage = damage

    @property
    def index(self) -> Index:
        """The index of its frames, empty if that cannot be read."""
        try:
            return self._reader.index
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)
            return Index()

    @property
    def point_times(self) -> array[int]:
        """The time of each point in it (wall ns), empty if that cannot be read."""
        try:
            return self._reader.point_times
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)
            return array("q")

    @property
    def bytes_lost(self) -> int:
        """The bytes of the segment if it is damaged."""
        return self._damage.get(self.path, 0)

    def refresh(self) -> None:
        """Do nothing, since no more frames follow."""

    def frames(self, first: int, end: int) -> Iterator[tuple[int, Frame]]:
        """Yield the frames from number `first` up to, not including, `end`, or up to the damage."""
        try:
            yield from self._reader.frames(first, end)
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)

    def texts(self) -> Iterator[tuple[int, int, dict[int, str]]]:
        """Yield the texts of each batch, with its time and epoch, up to the damage."""
        try:
            yield from self._reader.texts()
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)

    def kept_notes(self) -> Iterator[Packed]:
        """Yield the notes beside the frames, up to the damage."""
        try:
            yield from self._reader.kept_notes()
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)

    def points(self, rows: Sequence[int]) -> Iterator[Point]:
        """Yield the points at these indices of `point_times`, up to the damage."""
        try:
            yield from self._reader.points(rows)
        except FileNotFoundError:
            raise
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        """Log the damage once. Damaged Parquet raises errors of any type in pyarrow and numpy."""
        if self.path in self._damage:
            return
        self._damage[self.path] = sum(path.stat().st_size for path in self.path.iterdir())
        logger.warning("%s is damaged and is skipped (%s)", self.path, type(error).__name__)
