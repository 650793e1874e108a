"""The archive: manifests of closed segments, and the object store that has them, an S3 bucket or a directory.

    PREFIX/segments/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST/events.parquet …     the files of a closed segment
    PREFIX/manifests/ENGINE/DAY/EPOCH-SEQUENCE-FROM-TO-DIGEST.json                what they are: the commit

The files go first and the manifest last, so a segment counts whole or not at all. DIGEST is of the files' checksums:
a name stands for one content for ever, an upload that is repeated writes the same bytes again, and two writers that
archive the same stretch of an engine's stream keep two segments, whose common rows a reader counts once.

obstore does the I/O: it puts an object whole or not at all, in a directory too, bounds and repeats each request, and
takes credentials, region and endpoint from the usual AWS environment. pyarrow.fs, which is installed already, publishes
the half of a file whose upload raised, and writes into a directory in place.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import obstore
import pyarrow.parquet as pq
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from ..base.errors import BadTarget
from .segment_files import ClosedSegment, name_of_closed

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig


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
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(file.bytes for file in self.files)


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


# -------------------------------------------------------------------- the store


CONNECT_S: Final = 5
REQUEST_S: Final = 30
"""For one request. An upload goes in parts of PART_BYTES, each of which may take so long."""
REQUEST_RETRY_S: Final = 20
RETRIES: Final = 3
PART_BYTES: Final = 8 << 20
ENDPOINT: Final = "AWS_ENDPOINT_URL"
MANIFEST_BYTES: Final = 1 << 16
MAX_LISTED: Final = 1_000_000
STORE_ERROR_CHARS: Final = 200
MANIFESTS_AT_ONCE: Final = 8

# obstore has errors of its own, and FileNotFoundError, PermissionError and the like for what Python knows.
STORE_ERRORS: Final = (BaseError, OSError, ValueError)


class ArchiveError(OSError):
    """The archive cannot be read or written now. The message names it and the reason."""


def archive_directory(url: str) -> Path | None:
    """Return the directory of an archive at `url`, None for a bucket. Raises BadTarget for another URL."""
    scheme, separator, rest = url.partition("://")
    if scheme == "s3" and separator:
        return None
    if url and not separator:
        return Path(url).absolute()
    if scheme == "file" and rest.startswith("/"):
        return Path(unquote(rest))
    raise BadTarget(f"{url!r} is not an archive: name s3://BUCKET/PREFIX, file:///DIR or a directory")


class Archive:
    """The archive at `url`: `s3://BUCKET/PREFIX`, `file:///DIR` or a plain directory.

    Connects with the first request. Thread-safe. Raises BadTarget for another URL, and for a directory that is not
    there unless it is to be made.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        self.url = url
        directory = archive_directory(url)
        self.place = str(directory) if directory is not None else f"{url} at {os.environ.get(ENDPOINT, 'AWS')}"
        """A description that separates it from every other archive."""
        self._store: S3Store | LocalStore = _bucket(url) if directory is None else _directory(directory, make)

    def upload(self, path: Path, to: str) -> None:
        """Put a file under the name `to`, whole or not at all. Raises ArchiveError, FileNotFoundError if it is gone."""
        with path.open("rb") as file, self._naming_errors():
            obstore.put(self._store, to, file, chunk_size=PART_BYTES, max_concurrency=2)

    def commit(self, manifest: Manifest) -> None:
        """Publish a segment whose files are there, in the same bytes each time. Raises ArchiveError."""
        with self._naming_errors():
            obstore.put(self._store, manifest.path, msgspec.json.encode(manifest) + b"\n")

    def has(self, path: str) -> bool:
        """Whether there is such an object. Raises ArchiveError."""
        with self._naming_errors():
            try:
                obstore.head(self._store, path)
            except FileNotFoundError:
                return False
        return True

    def read(self, path: str, start: int, end: int) -> bytes:
        """Read bytes `start` up to `end` of an object. Raises ArchiveError."""
        with self._naming_errors():
            return bytes(obstore.get_range(self._store, path, start=start, end=end))

    def segments(self, since_ns: int, until_ns: int) -> Iterator[ArchivedSegment]:
        """Name the committed segments that overlap this time, in no order. Only the days in question are listed.

        Raises ArchiveError.
        """
        listed = 0
        with self._naming_errors():
            for engine in _folders(self._store, MANIFESTS):
                for day in _folders(self._store, engine):
                    if not ArchivedSegment.may_hold(day.rpartition("/")[2], since_ns, until_ns):
                        continue
                    for page in obstore.list(self._store, day):
                        listed += len(page)
                        if listed > MAX_LISTED:
                            raise ArchiveError(f"{self.url} has more than {MAX_LISTED:,} segments there: give --since")
                        found = (ArchivedSegment.of(each["path"]) for each in page)
                        yield from (each for each in found if each is not None and each.overlaps(since_ns, until_ns))

    def manifests(self, segments: list[ArchivedSegment]) -> list[Manifest]:
        """Read the manifests of these segments. Raises ArchiveError, and BadManifest for one that is damaged."""
        with ThreadPoolExecutor(MANIFESTS_AT_ONCE, "kvscope-manifests") as pool:
            return list(pool.map(self._manifest, segments))

    def _manifest(self, segment: ArchivedSegment) -> Manifest:
        with self._naming_errors():
            found = obstore.get(self._store, segment.path)
            if found.meta["size"] > MANIFEST_BYTES:
                raise BadManifest(f"{segment.path} in {self.url} has more than {MANIFEST_BYTES:,} bytes")
            return decode_manifest(segment, bytes(found.bytes()))

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Raise ArchiveError for an error of the store."""
        try:
            yield
        except (ArchiveError, BadManifest):
            raise
        except STORE_ERRORS as error:
            text = " ".join(str(error).split())
            inner = re.search(r"<Message>(.*?)</Message>", text)  # S3's own words for it
            raise ArchiveError(f"{self.url}: {(inner[1] if inner else text)[:STORE_ERROR_CHARS]}") from error


def _folders(store: S3Store | LocalStore, path: str) -> list[str]:
    return sorted(obstore.list_with_delimiter(store, path)["common_prefixes"])


def _bucket(url: str) -> S3Store:
    parts = urlsplit(url)
    if "@" in parts.netloc or not parts.netloc or parts.query or parts.fragment:
        raise BadTarget(
            "an archive in S3 is s3://BUCKET/PREFIX and no more: credentials, region and endpoint come from"
            " AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL"
        )
    endpoint = os.environ.get(ENDPOINT, "")
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": endpoint.startswith("http://"),
    }
    retry: RetryConfig = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=REQUEST_RETRY_S)}
    try:
        return S3Store.from_url(url, client_options=client, retry_config=retry)
    except STORE_ERRORS as error:
        raise BadTarget(f"{url} cannot be an archive: {' '.join(str(error).split())[:STORE_ERROR_CHARS]}") from error


def _directory(path: Path, make: bool) -> LocalStore:
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not path.is_dir():
            raise BadTarget(f"{path} is not an archive: `monitor serve --archive {path}` makes one there")
        return LocalStore(path)
    except STORE_ERRORS as error:
        raise BadTarget(f"{path} cannot be an archive: {error}") from error
