"""Copies closed segments to an archive, in a thread of its own: one at a time, tried again until each is there.

A marker in a segment's directory shows that the archive has it, so that a restart uploads nothing twice and retention
knows what it may delete. A service that is killed between the commit and the marker finds the commit and marks it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ..base.supervision import SupervisedThread, Supervisor
from .archive_store import Archive, ArchiveError, manifest_of
from .segment_files import ClosedSegment, closed_segments, engine_in

logger = logging.getLogger(__name__)

MARKER_FILE: Final = "archived.json"
ARCHIVE_EVERY_S: Final = 30.0
ARCHIVE_RETRY_S: Final = 5.0
LONGEST_ARCHIVE_RETRY_S: Final = 300.0
ARCHIVE_BEHIND_S: Final = 900.0
"""A segment that has waited for so long is reported, whether uploads fail or are slow."""
ARCHIVE_STOP_S: Final = 10.0
ARCHIVE_WITHIN_S: Final = 900.0
"""For one segment. An upload over a slow link takes minutes."""
REPORT_LOST_SEGMENTS_S: Final = 3600.0
"""A segment that was deleted before the archive had it is reported for so long."""


class ArchiveMarker(msgspec.Struct, frozen=True):
    """Where a segment was archived."""

    archive: str
    manifest: str


class ArchiveFigures(NamedTuple):
    """How far the archive is."""

    segments: int
    """Archived since the service began, as the next two."""
    bytes: int
    failures: int
    waiting: int
    """Closed segments that the archive does not have yet."""
    waiting_s: float
    """For how long the oldest of them has been closed, 0 without any."""
    deleted: int
    """Deleted from the local disk before the archive had them."""


class Archiver:
    """Copies what is closed under `history` to `archive`. `wake` it when a segment was closed, `stop` it at the end."""

    def __init__(
        self,
        history: Path,
        archive: Archive,
        retry_s: float = ARCHIVE_RETRY_S,
        wall_s: Callable[[], float] = time.time,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.archive = archive
        self._history = history
        self._retry_s = retry_s
        self._wall_s = wall_s
        self._archived: set[Path] = set()
        self._damaged: set[Path] = set()
        self._segments = self._bytes = self._failures = self._deleted = self._waiting = 0
        self._oldest_s = self._deleted_at_s = 0.0
        self._error = ""
        self._failed_turns = 0
        self._thread = SupervisedThread(
            "the archive", "copy", self._turn, supervisor or Supervisor(), within_s=ARCHIVE_WITHIN_S
        )
        self.start = self._thread.start
        self.wake = self._thread.wake

    def stop(self) -> None:
        """End, and wait at most ARCHIVE_STOP_S for the upload under way. The next service uploads what is left."""
        self._thread.stop(ARCHIVE_STOP_S)

    def has(self, segment: ClosedSegment) -> bool:
        """Whether the archive has this segment, or never will since a file of it is damaged. Any thread."""
        if segment.path in self._archived or segment.path in self._damaged:
            return True
        marker = read_marker(segment.path)
        return marker is not None and marker.archive == self.archive.place

    def lost(self, segment: ClosedSegment) -> None:
        """Report that retention deleted a segment that the archive does not have. Any thread."""
        self._deleted += 1
        self._deleted_at_s = self._wall_s()
        logger.error("%s was deleted for --keep-bytes before the archive had it", segment.path)

    def figures(self) -> ArchiveFigures:
        """Return how far the archive is. Any thread."""
        waiting_s = max(0.0, self._wall_s() - self._oldest_s) if self._oldest_s else 0.0
        return ArchiveFigures(self._segments, self._bytes, self._failures, self._waiting, waiting_s, self._deleted)

    def problem(self) -> str:
        """Return why segments do not reach the archive as they should, or empty if all is well. Any thread."""
        figures, problems = self.figures(), []
        if error := self._error:
            problems.append(f"segments do not reach the archive, and are tried again: {error}")
        elif figures.waiting_s > ARCHIVE_BEHIND_S:
            waited = f"a segment has waited for more than {ARCHIVE_BEHIND_S / 60:g} min"
            problems.append(f"the archive {self.archive.url} is behind: {waited}")
        if self._deleted_at_s and self._wall_s() - self._deleted_at_s < REPORT_LOST_SEGMENTS_S:
            problems.append(
                "--keep-bytes forced the deletion of segments that the archive does not have: they are lost"
            )
        return "; ".join(problems)

    # ---------------------------------------------------------------- the thread

    def _turn(self) -> float:
        try:
            self.archive_all()
        except OSError as error:
            self._error = str(error)
        except Exception as error:
            logger.exception("the archive could not be written")
            self._error = f"{type(error).__name__}: {error}"
        if not self._error:
            self._failed_turns = 0
            return ARCHIVE_EVERY_S
        self._failures += 1
        self._failed_turns = min(self._failed_turns + 1, 10)
        return min(self._retry_s * 2.0 ** (self._failed_turns - 1), LONGEST_ARCHIVE_RETRY_S)

    def archive_all(self) -> None:
        """Upload every closed segment that the archive does not have, the oldest first. Raises ArchiveError."""
        waiting = sorted(self._to_archive(), key=lambda each: each[1].to_ns)
        self._note_waiting([segment for _, segment in waiting])
        for number, (engine, segment) in enumerate(waiting):
            if self._thread.is_stopping:
                return
            self._thread.beat()
            try:
                self._upload(engine, segment)
            except ArchiveError:
                raise
            except FileNotFoundError:
                if segment.path.exists():  # else retention has deleted it
                    self._leave_out(segment, "a file is missing")
            except ValueError as error:  # of pyarrow: a file is damaged
                self._leave_out(segment, str(error))
            self._note_waiting([segment for _, segment in waiting[number + 1 :]])
        self._error = ""

    def _to_archive(self) -> Iterator[tuple[str, ClosedSegment]]:
        seen: set[Path] = set()
        for directory in self._history.iterdir() if self._history.is_dir() else ():
            for segment in closed_segments(directory) if directory.is_dir() else ():
                seen.add(segment.path)
                if not self.has(segment):
                    yield engine_in(directory), segment
                elif segment.path not in self._damaged:
                    self._archived.add(segment.path)
        self._archived &= seen
        self._damaged &= seen

    def _upload(self, engine: str, segment: ClosedSegment) -> None:
        manifest = manifest_of(engine, segment)
        if not self.archive.has(manifest.path):
            for file in manifest.files:
                self.archive.upload(segment.path / file.path.rpartition("/")[2], file.path)
            self.archive.commit(manifest)
        write_marker(segment.path, ArchiveMarker(self.archive.place, manifest.path))
        self._archived.add(segment.path)
        self._segments += 1
        self._bytes += manifest.size
        self._error = ""

    def _note_waiting(self, segments: list[ClosedSegment]) -> None:
        self._waiting = len(segments)
        self._oldest_s = _closed_s(segments[0]) if segments else 0.0

    def _leave_out(self, segment: ClosedSegment, why: str) -> None:
        logger.error("%s is damaged and is not archived: %s", segment.path, why)
        self._damaged.add(segment.path)
        self._failures += 1


def read_marker(directory: Path) -> ArchiveMarker | None:
    """Return where the segment in `directory` was archived, or None if it was not."""
    try:
        return msgspec.json.decode((directory / MARKER_FILE).read_bytes(), type=ArchiveMarker)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def write_marker(directory: Path, marker: ArchiveMarker) -> None:
    """Mark a segment as archived, whole or not at all. Raises OSError."""
    new = directory / f".{MARKER_FILE}"
    new.write_bytes(msgspec.json.encode(marker))
    new.replace(directory / MARKER_FILE)


def _closed_s(segment: ClosedSegment) -> float:
    try:
        return segment.path.stat().st_mtime
    except OSError:
        return segment.to_ns / 1e9
