"""Members of zip archives from elsewhere, read in pieces and within bounds.

Only stored and deflated members are read: those are what kvscope, logging tools and browsers write, and a decoder of
another kind is one more that damage can upset.
"""

from __future__ import annotations

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from kvscope.monitor.events import limits

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


def members_of(path: Path) -> list[zipfile.ZipInfo]:
    """Return the files in a zip. Raises ZIP_DAMAGE, BadZipFile also for too many members."""
    with zipfile.ZipFile(path) as archive:
        members = [each for each in archive.infolist() if not each.is_dir()]
    if len(members) > limits.ARCHIVE_MEMBERS:
        raise zipfile.BadZipFile(f"it has more than {limits.ARCHIVE_MEMBERS:,} members")
    return members


def opened_member(path: Path, member: zipfile.ZipInfo) -> IO[bytes]:
    """Open a member for reading. Raises ZIP_DAMAGE, BadZipFile also for an encrypted or otherwise packed one."""
    if member.flag_bits & _ENCRYPTED:
        raise zipfile.BadZipFile("a member is encrypted")
    if member.compress_type not in _METHODS:
        raise zipfile.BadZipFile("a member is neither stored nor deflated")
    with zipfile.ZipFile(path) as archive:
        return archive.open(member)  # keeps the file open until it is closed


def pieces_of(path: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the content of a bundle's member in pieces. Raises ZIP_DAMAGE, BadZipFile also beyond its bound."""
    left = member.compress_size * limits.BUNDLE_RATIO + limits.BUNDLE_SLACK_BYTES
    with opened_member(path, member) as file:
        while piece := file.read(PIECE_BYTES):
            left -= len(piece)
            if left < 0:
                raise zipfile.BadZipFile(f"a member unpacks to more than {limits.BUNDLE_RATIO} times its size")
            yield piece
