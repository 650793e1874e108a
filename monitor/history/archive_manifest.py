"""The contents of an archive: a manifest for each segment, and the names of objects.

    PREFIX/segments/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST/events.parquet …     the files of a closed segment
    PREFIX/manifests/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST.json                what they are: the commit

The files go first and the manifest last, so a segment counts whole or not at all. DIGEST is of the files' checksums:
a name stands for one content for ever, an upload that is repeated writes the same bytes again, and two writers that
archive the same stretch of an engine's stream keep two segments, whose common rows a reader counts once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import pyarrow.parquet as pq

from kvscope.monitor.history.segment_files import ClosedSegment, name_of_closed

MANIFESTS: Final = "manifests"
SEGMENTS: Final = "segments"
FORMAT: Final = 1
"""Version of the manifest. A reader refuses a later one."""
LONGEST_DAYS: Final = 2
"""A segment lies under the day on which it begins, and may last into the next one."""
DIGEST_CHARS: Final = 16
_SEGMENT_NAME: Final = re.compile(r"(\d{20})-(\d{15})-(\d{20})-(\d{20})-([0-9a-f]{16})")
_DAY: Final = "%Y-%m-%d"
_CHUNK: Final = 1 << 20
PARQUET_FILES: Final = ("events", "frames", "keyframes", "notes", "points")


class BadManifest(ValueError):
    """A manifest that this release cannot read. The message names it and the reason."""


class ArchivedFile(msgspec.Struct, frozen=True):
    """A Parquet file of a segment."""

    path: str
    """Below the archive's prefix."""
    bytes: int
    rows: int
    sha256: str


class ArchivedSegment(NamedTuple):
    """A committed segment, by the name of its manifest. Times are wall ns."""

    folder: str
    """ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST."""
    from_ns: int
    to_ns: int

    @property
    def path(self) -> str:
        """The manifest's."""
        return f"{MANIFESTS}/{self.folder}.json"

    def overlaps(self, since_ns: int, until_ns: int) -> bool:
        """Whether any of it is within this time."""
        return self.from_ns <= until_ns and self.to_ns >= since_ns

    @staticmethod
    def of(path: str) -> ArchivedSegment | None:
        """Return the segment whose manifest has that path, or None for another object."""
        folder = path.removeprefix(f"{MANIFESTS}/").removesuffix(".json")
        match = _SEGMENT_NAME.fullmatch(folder.rpartition("/")[2])
        return ArchivedSegment(folder, int(match[3]), int(match[4])) if match and path.endswith(".json") else None

    @staticmethod
    def may_hold(day: str, since_ns: int, until_ns: int) -> bool:
        """Return whether segments that begin on that day may overlap this time, or True for a folder that names no
        day.
        """
        try:
            began = datetime.strptime(day, _DAY).replace(tzinfo=UTC)
        except ValueError:
            return True
        ends_ns = (began + timedelta(days=LONGEST_DAYS)).timestamp() * 1e9
        return began.timestamp() * 1e9 <= until_ns and ends_ns >= since_ns


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a segment, as its JSON has it. Times are wall ns."""

    format: int = FORMAT
    engine: str
    epoch: int
    from_ns: int
    to_ns: int
    folder: str
    """ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST."""
    sequences: tuple[int, int] | None
    """The first and last batch in it, None without batches."""
    points_ns: tuple[int, int] | None
    """The first and last point in it, None without points."""
    files: tuple[ArchivedFile, ...]

    @property
    def path(self) -> str:
        """The path of the manifest itself, below the archive's prefix."""
        return f"{MANIFESTS}/{self.folder}.json"

    @property
    def digest(self) -> str:
        """The checksum of all files."""
        return self.folder[-DIGEST_CHARS:]

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(file.bytes for file in self.files)

    def encoded(self) -> bytes:
        """Return the manifest as JSON: the same bytes for the same segment."""
        return msgspec.json.encode(self) + b"\n"


class SegmentRange(NamedTuple):
    """The batches and points of a segment: what it may have in common with another."""

    sequences: tuple[int, int] | None
    points_ns: tuple[int, int] | None


_MANIFEST_DECODER: Final = msgspec.json.Decoder(Manifest)


def decode_manifest(segment: ArchivedSegment, text: bytes) -> Manifest:
    """Return the manifest of a segment. Raises BadManifest."""
    try:
        manifest = _MANIFEST_DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadManifest(f"{segment.path} in the archive is damaged: {error}") from None
    if manifest.format > FORMAT:
        raise BadManifest(f"{segment.path} in the archive has format {manifest.format}: upgrade")
    folder = f"{SEGMENTS}/{segment.folder}/"
    if manifest.folder != segment.folder or not all(file.path.startswith(folder) for file in manifest.files):
        raise BadManifest(f"{segment.path} in the archive is of another segment")
    return manifest


def manifest_of(engine: str, segment: ClosedSegment) -> Manifest:
    """Return the manifest of a closed segment on disk, after reading all of its files. Raises OSError."""
    names = [f"{name}.parquet" for name in PARQUET_FILES]
    sums = {name: _sha256(segment.path / name) for name in names}
    digest = hashlib.sha256("".join(f"{name} {sums[name]}\n" for name in names).encode()).hexdigest()[:DIGEST_CHARS]
    day, name = segment.path.parent.name, name_of_closed(*segment[:2], segment.from_ns, segment.to_ns)
    folder = f"{segment.path.parent.parent.name}/{day}/{name}-{digest}"
    found = range_of(segment.path)
    return Manifest(
        engine=engine,
        epoch=segment.epoch,
        from_ns=segment.from_ns,
        to_ns=segment.to_ns,
        folder=folder,
        sequences=found.sequences,
        points_ns=found.points_ns,
        files=tuple(
            ArchivedFile(
                f"{SEGMENTS}/{folder}/{name}",
                (segment.path / name).stat().st_size,
                pq.read_metadata(segment.path / name).num_rows,
                sums[name],
            )
            for name in names
        ),
    )


def range_of(directory: Path) -> SegmentRange:
    """Return which batches and points a segment's directory holds. Raises OSError."""
    frames = pq.read_table(directory / "frames.parquet", columns=["sequence", "keyframe"], use_threads=False)
    kept = zip(frames["sequence"].to_pylist(), frames["keyframe"].to_pylist(), strict=True)
    sequences = [sequence for sequence, keyframe in kept if not keyframe and sequence >= 0]
    points = pq.read_table(directory / "points.parquet", columns=["at_ns"], use_threads=False)
    return SegmentRange(_first_and_last(sequences), _first_and_last(points["at_ns"].to_pylist()))


def _first_and_last(values: Sequence[int]) -> tuple[int, int] | None:
    return (min(values), max(values)) if values else None


def _sha256(path: Path) -> str:
    checksum = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum.update(chunk)
    return checksum.hexdigest()
