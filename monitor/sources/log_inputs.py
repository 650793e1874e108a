"""Texts that are no single file: standard input, the files of a directory, the members of a zip.

Nothing of them is written anywhere. Standard input is kept in memory, since a text is read twice.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, NamedTuple

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.sources.zip_members import ZIP_DAMAGE, members_of, opened_member

STANDARD_INPUT: Final = "-"
MOST_TEXTS: Final = 200
"""Bound of texts of a directory or a zip. A note names the ones left out."""
MOST_INPUT_BYTES: Final = 1 << 30
HEAD_BYTES: Final = 4096
NOT_TEXT: Final = (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"SQLite", b"PAR1")


class LogInput(NamedTuple):
    """A text under a name of its own. `ended`: when it was last written to. `packed_bytes`: its size as it lies."""

    name: str
    ended: datetime
    opened: Callable[[], IO[bytes]]
    packed_bytes: int

    def open(self, _mode: str = "rb") -> IO[bytes]:
        """Return it from its beginning. Raises OSError."""
        try:
            return self.opened()
        except FileNotFoundError:
            raise
        except ZIP_DAMAGE as error:
            raise OSError(f"the zip is damaged or locked: {error or type(error).__name__}") from error


def file_input(path: Path, name: str = "") -> LogInput:
    """Return a file as an input. Raises OSError."""
    stat = path.stat()
    ended = datetime.fromtimestamp(stat.st_mtime, UTC)
    return LogInput(name or path.name, ended, lambda: path.open("rb"), stat.st_size)


def standard_input() -> LogInput:
    """Read standard input to its end. Raises BadTarget if it is a terminal, empty, or more than 1 GiB."""
    if sys.stdin is None or sys.stdin.isatty():
        raise BadTarget(
            "-: standard input is a terminal: pipe a text into it, as in `kubectl logs POD | monitor doctor -`"
        )
    text = sys.stdin.buffer.read(MOST_INPUT_BYTES + 1)
    if len(text) > MOST_INPUT_BYTES:
        raise BadTarget(
            f"-: standard input has more than {MOST_INPUT_BYTES >> 30} GiB: write it to a file, and name that"
        )
    if not text.strip():
        raise BadTarget("-: standard input is empty")
    return LogInput("stdin", datetime.now(UTC), lambda: io.BytesIO(text), len(text))


def folder_inputs(folder: Path) -> Sequence[LogInput]:
    """Return the files of a directory and the directories in it, the oldest first. Raises OSError."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    found = [file_input(path, str(path.relative_to(folder))) for path in files]
    return [each for each in sorted(found, key=lambda each: (each.ended, each.name)) if _is_text(each)]


def zip_inputs(path: Path) -> Sequence[LogInput]:
    """Return the members of a zip in its order. Raises BadTarget for a damaged one."""
    try:
        members = members_of(path)
    except ZIP_DAMAGE as error:
        raise BadTarget(f"{path} is a damaged zip: {error or type(error).__name__}") from error
    if sum(each.file_size for each in members) > MOST_INPUT_BYTES:
        raise BadTarget(f"{path}: its members are more than {MOST_INPUT_BYTES >> 30} GiB unpacked")
    return [each for each in (_member(path, member) for member in members) if _is_text(each)]


def holds_texts(folder: Path) -> bool:
    """Return whether a directory has a file that may be a text. Raises OSError."""
    return any(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def _member(path: Path, member: zipfile.ZipInfo) -> LogInput:
    try:
        written = datetime(*member.date_time, tzinfo=UTC)
    except ValueError:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return LogInput(member.filename, written, lambda: opened_member(path, member), member.compress_size)


def _is_text(text: LogInput) -> bool:
    """Whether it may be one: gzip and UTF-16 may, other bytes of zero may not."""
    try:
        with text.open() as file:
            head = file.read(HEAD_BYTES)
    except ZIP_DAMAGE:
        return True  # it is named in a note when it is read
    if head.startswith((b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")):
        return True
    return bool(head) and not head.startswith(NOT_TEXT) and b"\0" not in head
