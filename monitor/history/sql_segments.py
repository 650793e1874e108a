"""The segments that a query reads, on disk and in an archive, and which of their rows count if several have the same.

A segment that is in both places is read from disk. Two services that watch one engine archive the same batches in
segments of different names: of each batch the rows of one segment count, and of points at the same time those of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.history.archive_files import PROTOCOL, ArchiveFiles
from kvscope.monitor.history.archive_manifest import SEGMENTS, BadManifest, SegmentRange, range_of
from kvscope.monitor.history.archive_store import Archive, ArchiveError
from kvscope.monitor.history.archiver import read_marker
from kvscope.monitor.history.sealed_segment import write_tables
from kvscope.monitor.history.segment_files import ClosedSegment, HistorySegment, engine_in, history_segments

MAX_ARCHIVED: Final = 20_000
"""Segments of an archive in one query: their manifests take a minute to read, and 100 MB."""


class BadQuery(KvscopeError, ValueError):
    """The query cannot be run. The message gives the reason."""


class TimeRange(NamedTuple):
    """The rows that a query sees (wall ns, both included)."""

    since_ns: int = 0
    until_ns: int = (1 << 63) - 1


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


def local_segments(directory: Path, scratch: Path, window: TimeRange) -> Iterator[tuple[str, ClosedSegment]]:
    """Yield all segments with their engines' names, after turning open ones into closed ones in `scratch`."""
    of_engines = [path for path in directory.iterdir() if path.is_dir()]
    for number, engine in enumerate([directory, *of_engines]):
        for segment in history_segments(engine):
            closed = _as_closed(segment, scratch / str(number))
            if closed is not None and closed.from_ns <= window.until_ns and closed.to_ns >= window.since_ns:
                yield engine_in(engine), closed


def _as_closed(segment: HistorySegment, into: Path) -> ClosedSegment | None:
    if isinstance(segment, ClosedSegment):
        return segment
    try:
        return write_tables(segment.path, into)
    except FileNotFoundError:  # it was closed just now
        again = {
            closed[:2]: closed for closed in history_segments(segment.path.parent) if isinstance(closed, ClosedSegment)
        }
        return again.get(segment[:2])


def with_archived(
    local: Sequence[tuple[str, ClosedSegment]], archive: Archive, window: TimeRange, timeout_s: float
) -> tuple[list[SqlSegment], ArchiveFiles]:
    """Return the local segments and those that only the archive has, and the archive's files. Raises BadQuery."""
    here = {marker.manifest for _, segment in local if (marker := read_marker(segment.path)) is not None}
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
    shared = {(each.engine, each.epoch) for each in manifests}
    segments = [
        SqlSegment(
            str(segment.path),
            engine,
            segment.epoch,
            range_of(segment.path) if (engine, segment.epoch) in shared else None,
        )
        for engine, segment in local
    ]
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
    return segments, ArchiveFiles(archive, sizes, timeout_s)


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
