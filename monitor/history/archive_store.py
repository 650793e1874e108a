"""The object store of an archive: an S3 bucket or a directory, with bounded requests.

obstore does the I/O: it puts an object whole or not at all, in a directory too, bounds and repeats each request, and
takes credentials, region and endpoint from the usual AWS environment. pyarrow.fs, which is installed already, publishes
the half of a file whose upload raised, and writes into a directory in place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, S3Store

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.history.archive_manifest import (
    MANIFESTS,
    ArchivedSegment,
    BadManifest,
    Manifest,
    decode_manifest,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

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
        with path.open("rb") as file:
            try:
                obstore.put(self._store, to, file, chunk_size=PART_BYTES, max_concurrency=2)
            except STORE_ERRORS as error:
                raise self._failed(error) from error

    def commit(self, manifest: Manifest) -> None:
        """Publish a segment whose files are there. Raises ArchiveError."""
        try:
            obstore.put(self._store, manifest.path, manifest.encoded())
        except STORE_ERRORS as error:
            raise self._failed(error) from error

    def has(self, path: str) -> bool:
        """Whether there is such an object. Raises ArchiveError."""
        try:
            obstore.head(self._store, path)
        except FileNotFoundError:
            return False
        except STORE_ERRORS as error:
            raise self._failed(error) from error
        return True

    def read(self, path: str, start: int, end: int) -> bytes:
        """Read bytes `start` up to `end` of an object. Raises ArchiveError."""
        try:
            return bytes(obstore.get_range(self._store, path, start=start, end=end))
        except STORE_ERRORS as error:
            raise self._failed(error) from error

    def segments(self, since_ns: int, until_ns: int) -> Iterator[ArchivedSegment]:
        """Name the committed segments that overlap this time, in no order. Only the days in question are listed.

        Raises ArchiveError.
        """
        listed = 0
        try:
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
        except ArchiveError:
            raise
        except STORE_ERRORS as error:
            raise self._failed(error) from error

    def manifests(self, segments: list[ArchivedSegment]) -> list[Manifest]:
        """Read the manifests of these segments. Raises ArchiveError, and BadManifest for one that is damaged."""
        with ThreadPoolExecutor(MANIFESTS_AT_ONCE, "kvscope-manifests") as pool:
            return list(pool.map(self._manifest, segments))

    def _manifest(self, segment: ArchivedSegment) -> Manifest:
        try:
            found = obstore.get(self._store, segment.path)
            if found.meta["size"] > MANIFEST_BYTES:
                raise BadManifest(f"{segment.path} in {self.url} has more than {MANIFEST_BYTES:,} bytes")
            return decode_manifest(segment, bytes(found.bytes()))
        except BadManifest:
            raise
        except STORE_ERRORS as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> ArchiveError:
        text = " ".join(str(error).split())
        inner = re.search(r"<Message>(.*?)</Message>", text)  # S3's own words for it
        return ArchiveError(f"{self.url}: {(inner[1] if inner else text)[:STORE_ERROR_CHARS]}")


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
