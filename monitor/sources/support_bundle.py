"""Zip archives from elsewhere, and the support bundle: an anonymized zip with a part of an engine's events.

Members are read in pieces and within bounds, and only stored and deflated ones: those are what kvscope, logging tools
and browsers write, and a decoder of another kind is one more that damage can upset.
"""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from ..base import limits
from ..base.errors import BadTarget
from ..contract import journal

ZIP_DAMAGE: Final = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    ValueError,
)
"""Errors of reading a damaged, encrypted or forged zip."""
PIECE_BYTES: Final = 1 << 20
_ENCRYPTED: Final = 1
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def members_of(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the files in a zip, which is opened once for all of them: to open it is to read all their names.

    Raises BadZipFile for too many members.
    """
    members = [each for each in archive.infolist() if not each.is_dir()]
    if len(members) > limits.ARCHIVE_MEMBERS:
        raise zipfile.BadZipFile(f"it has more than {limits.ARCHIVE_MEMBERS:,} members")
    return members


def opened_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member for reading. Raises ZIP_DAMAGE, BadZipFile also for an encrypted or otherwise packed one."""
    if member.flag_bits & _ENCRYPTED:
        raise zipfile.BadZipFile("a member is encrypted")
    if member.compress_type not in _METHODS:
        raise zipfile.BadZipFile("a member is neither stored nor deflated")
    return archive.open(member)


def pieces_of(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the content of a bundle's member in pieces. Raises ZIP_DAMAGE, BadZipFile also beyond its bound."""
    left = member.compress_size * limits.BUNDLE_RATIO + limits.BUNDLE_SLACK_BYTES
    with opened_member(archive, member) as file:
        while piece := file.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise zipfile.BadZipFile(f"a member unpacks to more than {limits.BUNDLE_RATIO} times its size")
            yield piece


EVENTS_FOLDER: Final = "events/"
"""The folder in it that is a journal."""
OTHER_MEMBERS: Final = frozenset(("README.txt", "report.txt", "report.json", "configuration.json", "versions.json"))
"""Its other members. Other archives may have one or two files of these names."""
BEGINNING_BYTES: Final = 1 << 20
ZIP: Final = b"PK\x03\x04"


class NotABundle(BadTarget):
    """The file is a zip, and no bundle of ours, or a damaged one. The message gives the reason."""


def is_bundle(path: Path) -> bool:
    """Return whether the zip at `path` has events in it, or cannot be read. Raises OSError.

    A bundle whose directory is damaged may lack the name of its events: its reports are no logs of an engine. The names
    also stand before each member, the first of them at the file's beginning.
    """
    with path.open("rb") as file:
        beginning = file.read(BEGINNING_BYTES)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [member.filename for member in members_of(archive)]
    except ZIP_DAMAGE:
        return True  # reading it explains why
    written = sum(name.encode() in beginning for name in OTHER_MEMBERS)
    return not names or written > 2 or any(name.startswith(EVENTS_FOLDER) for name in names)


def unpack_events(path: Path, directory: Path) -> None:
    """Write the journal that is in the bundle at `path` into `directory`. Raises NotABundle."""
    left = limits.BUNDLE_BYTES
    try:
        with zipfile.ZipFile(path) as archive:
            segments = [
                member
                for member in members_of(archive)
                if member.filename.startswith(EVENTS_FOLDER) and member.filename.endswith(journal.SUFFIX)
            ]
            if len(segments) > limits.BUNDLE_SEGMENTS:
                raise NotABundle(
                    f"{path} has {len(segments):,} segments. A bundle has one for each epoch of an engine, and"
                    f" {limits.BUNDLE_SEGMENTS:,} at most"
                )
            for member in segments:
                with (directory / Path(member.filename).name).open("wb") as file:
                    for piece in pieces_of(archive, member):
                        left -= len(piece)
                        if left < 0:
                            raise NotABundle(f"{path}: its events are more than {limits.BUNDLE_BYTES >> 30} GiB")
                        file.write(piece)
    except NotABundle:
        raise
    except ZIP_DAMAGE as error:
        raise NotABundle(f"{path} is a damaged zip, or none: {error or type(error).__name__}") from error
    if not any(directory.iterdir()):
        raise NotABundle(f"{path} is a zip without events: `monitor bundle TARGET FILE` makes one that has them")
