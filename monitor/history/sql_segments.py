"""The segments that a query reads, on disk and in an archive, and which of their rows count if several have the same.

A segment that is damaged, or is no regular file, is left out and named. A segment that is in both places is read from
disk. Two services that watch one engine archive the same batches in
segments of different names: of each batch the rows of one segment count, and of points at the same time those of one.
"""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..base.errors import KvscopeError
from .archive_store import SEGMENTS, Archive, ArchiveError, BadManifest, SegmentRange, range_of
from .archiver import read_marker
from .sealed_segment import write_tables
from .segment_files import ClosedSegment, HistorySegment, closed_form, engine_in, history_segments
from .sql_files import PROTOCOL, ArchiveFiles, LocalFiles
from .sql_query import BadQuery, TimeRange

NO_FILE: Final = "is no regular file"
DAMAGED: Final = "is damaged"
MAX_ARCHIVED: Final = 20_000
"""Segments of an archive in one query: their manifests take a minute to read, and 100 MB."""


class SqlSegment(NamedTuple):
    """A folder of Parquet files, on disk or in the archive. `range` None: nothing else may have the same rows."""

    folder: str
    engine: str
    epoch: int
    range: SegmentRange | None = None


class HiddenPoints(NamedTuple):
    """Points of a segment that another has too (wall ns, both included)."""

    folder: str
    from_ns: int
    to_ns: int


class LocalSegments:
    """The segments of a history or a recording in `directory`, as closed ones: the open ones are closed in `scratch`.

    `left_out`: why a segment is not among them, by its path.
    """

    def __init__(self, directory: Path | None, scratch: Path, window: TimeRange) -> None:
        self.left_out: dict[Path, str] = {}
        self.segments = [] if directory is None else list(self._found(directory, scratch, window))

    def _found(self, directory: Path, scratch: Path, window: TimeRange) -> Iterator[tuple[str, ClosedSegment]]:
        of_engines = [path for path in directory.iterdir() if path.is_dir()]
        for number, engine in enumerate([directory, *of_engines]):
            for segment in history_segments(engine):
                closed = self._as_closed(segment, scratch / str(number))
                if closed is not None and closed.from_ns <= window.until_ns and closed.to_ns >= window.since_ns:
                    yield engine_in(engine), closed

    def _as_closed(self, segment: HistorySegment, into: Path) -> ClosedSegment | None:
        if isinstance(segment, ClosedSegment):
            return segment
        try:
            if not stat.S_ISREG(segment.path.lstat().st_mode):
                self.left_out[segment.path] = NO_FILE
                return None
            return write_tables(segment.path, into)
        except FileNotFoundError:  # it was closed just now
            return closed_form(segment)
        except Exception as error:  # damage raises errors of any type
            self.left_out[segment.path] = str(error) if isinstance(error, KvscopeError) else DAMAGED
            return None


def segments_on_disk(
    local: LocalSegments, files: LocalFiles, shared: Collection[tuple[str, int]] = ()
) -> list[SqlSegment]:
    """Return the local segments, after adding their files to `files`. `shared`: engines and epochs of an archive's
    segments. Raises BadQuery.
    """
    segments = []
    for engine, segment in local.segments:
        try:
            folder, irregular = files.folder(segment.path)
        except FileNotFoundError as error:
            raise BadQuery(
                f"{segment.path} was deleted while the query began, as what is too old is: ask again"
            ) from error
        local.left_out |= dict.fromkeys(irregular, NO_FILE)
        known = None
        if (engine, segment.epoch) in shared:
            try:
                known = range_of(segment.path) if not irregular else None
            except Exception:  # as above
                local.left_out[segment.path] = DAMAGED
            if known is None:
                continue
        segments.append(SqlSegment(folder, engine, segment.epoch, known))
    return segments


def with_archived(
    local: LocalSegments, files: LocalFiles, archive: Archive, window: TimeRange
) -> tuple[list[SqlSegment], ArchiveFiles]:
    """Return the local segments and those that only the archive has, and the archive's files. Raises BadQuery."""
    here = {marker.manifest for _, segment in local.segments if (marker := read_marker(segment.path)) is not None}
    try:
        found = [segment for segment in archive.segments(*window) if segment.path not in here]
        if len(found) > MAX_ARCHIVED:
            raise BadQuery(
                f"{len(found):,} segments of {archive.url} are of that time, a query reads {MAX_ARCHIVED:,} at most:"
                " give --since and --until"
            )
        manifests = archive.manifests(found)
    except (ArchiveError, BadManifest) as error:
        raise BadQuery(f"the archive cannot be read: {error}") from error
    segments = segments_on_disk(local, files, {(each.engine, each.epoch) for each in manifests})
    segments += [
        SqlSegment(
            f"{PROTOCOL}://{SEGMENTS}/{each.folder}",
            each.engine,
            each.epoch,
            SegmentRange(each.sequences, each.points_ns),
        )
        for each in sorted(manifests, key=lambda each: each.folder)
    ]
    sizes = {file.path: file.bytes for each in manifests for file in each.files}
    return segments, ArchiveFiles(archive, sizes)


def overlapping(segments: Sequence[SqlSegment]) -> set[str]:
    """Return the folders of segments whose batches another may have too."""
    found: set[str] = set()
    for of_epoch in _by_epoch(segments):
        ranges = sorted(
            (*each.range.sequences, each.folder) for each in of_epoch if each.range and each.range.sequences
        )
        found |= _touching(ranges)
    return found


def hidden_points(segments: Sequence[SqlSegment]) -> list[HiddenPoints]:
    """Return what is to be left out of segments whose points are at the same time as an earlier one's."""
    hidden: list[HiddenPoints] = []
    for of_epoch in _by_epoch(segments):
        ranges = sorted(
            (*each.range.points_ns, each.folder) for each in of_epoch if each.range and each.range.points_ns
        )
        until_ns = -1
        for from_ns, to_ns, folder in ranges:
            if from_ns <= until_ns:
                hidden.append(HiddenPoints(folder, from_ns, until_ns))
            until_ns = max(until_ns, to_ns)
    return hidden


def _by_epoch(segments: Sequence[SqlSegment]) -> Iterator[list[SqlSegment]]:
    of_epoch: defaultdict[tuple[str, int], list[SqlSegment]] = defaultdict(list)
    for segment in segments:
        of_epoch[segment.engine, segment.epoch].append(segment)
    yield from of_epoch.values()


def _touching(ranges: Sequence[tuple[int, int, str]]) -> set[str]:
    found: set[str] = set()
    longest = ""
    until = -1
    for first, last, folder in ranges:
        if first <= until:
            found |= {longest, folder}
        if last > until:
            until, longest = last, folder
    return found
