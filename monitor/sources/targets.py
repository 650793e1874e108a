"""Determines by its form or content what a target on the command line is, and opens the texts of one that is no file.

Nothing is connected to. Such texts are standard input, the files of a directory, and the members of a zip. Nothing of
them is written anywhere. Standard input is kept in memory, since a text is read twice.
"""

from __future__ import annotations

import io
import stat
import sys
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import IO, Final, NamedTuple

from ..base.errors import BadTarget
from ..contract import journal
from .support_bundle import ZIP, ZIP_DAMAGE, is_bundle, members_of, opened_member

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
        archive = zipfile.ZipFile(path)  # open for as long as a member may be read
        members = members_of(archive)
    except ZIP_DAMAGE as error:
        raise BadTarget(f"{path} is a damaged zip: {error or type(error).__name__}") from error
    if sum(each.file_size for each in members) > MOST_INPUT_BYTES:
        raise BadTarget(f"{path}: its members are more than {MOST_INPUT_BYTES >> 30} GiB unpacked")
    return [each for each in (_member(path, archive, member) for member in members) if _is_text(each)]


def holds_texts(folder: Path) -> bool:
    """Return whether a directory has a file that may be a text. Raises OSError."""
    return any(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def _member(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> LogInput:
    try:
        written = datetime(*member.date_time, tzinfo=UTC)
    except ValueError:
        written = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return LogInput(member.filename, written, lambda: opened_member(archive, member), member.compress_size)


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


SOURCES_PATH: Final = "/kv_event_sources"
"""Where a vLLM reports where it publishes KV events."""
PROMETHEUS_PREFIX: Final = "prometheus+"
"""Before the address of a Prometheus server: http://HOST:PORT alone is a kvscope service."""


class TargetKind(StrEnum):
    """The built-in kinds of target."""

    STREAM = "stream"
    KV_EVENTS = "kv-events"
    METRICS = "metrics"
    SERVICE = "service"
    RECORDING = "recording"
    BUNDLE = "bundle"
    LOG = "log"
    PROSE = "prose"
    """A log by its form, until it is read and has no statistics of an engine."""
    PROMETHEUS = "prometheus"


def kind_of(target: str) -> TargetKind:
    """Return the kind of `target`. Raises BadTarget for an unknown form, a directory without a recording, and a path
    that does not exist or cannot be read.
    """
    if target.startswith("tcp://"):
        port = target.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise BadTarget(f"{target} names no port from 1 to 65535: an event stream looks like tcp://127.0.0.1:5757")
        return TargetKind.STREAM
    if target.startswith("ipc://"):
        return TargetKind.STREAM
    if target.startswith(PROMETHEUS_PREFIX):
        return TargetKind.PROMETHEUS
    if target.startswith(("http://", "https://")):
        address = target.partition("?")[0].rstrip("/")
        if address.endswith(SOURCES_PATH):
            return TargetKind.KV_EVENTS
        return TargetKind.METRICS if address.endswith("/metrics") else TargetKind.SERVICE
    try:
        return _kind_of_path(target)
    except OSError as error:
        raise BadTarget(f"{error.filename or target}: cannot be read: {error.strerror}") from error


def is_folder(path: Path) -> bool:
    """Return whether `path` is a directory. Raises OSError where `Path.is_dir` of Python 3.14 returns False: for a path
    that this process may not see.
    """
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    """Return the mode of a file, None if there is none. Raises OSError for a path that may not be seen."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _kind_of_path(target: str) -> TargetKind:
    path = Path(target)
    if target == STANDARD_INPUT:
        return TargetKind.LOG
    if target and is_folder(path):
        segments = journal.journal_segments(path)
        if not segments and holds_texts(path):
            return TargetKind.LOG
        if not segments:
            raise BadTarget(
                f"{path} holds no recording: no file in it is named EPOCH-SEQUENCE{journal.SUFFIX}; nor a log"
            )
        for segment in segments:
            segment.path.open("rb").close()  # one that may not be read is reported before anything is read
        return TargetKind.RECORDING
    if not target or _mode(path) is None:
        raise BadTarget(
            f"{target or repr(target)}: there is no such file or directory. A target is an event stream (tcp://127.0.0.1:5757),"
            " a metrics page (http://127.0.0.1:8000/metrics), a kvscope service (http://127.0.0.1:8765), a recording"
            " (a directory), or logs (a file, a directory, a zip, or - for standard input)"
        )
    with path.open("rb") as file:
        head = file.read(len(journal.HEADER))
    if head.startswith(ZIP):
        return TargetKind.BUNDLE if is_bundle(path) else TargetKind.LOG
    return TargetKind.RECORDING if head == journal.HEADER else TargetKind.LOG
