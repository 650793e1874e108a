"""The history that a service keeps: a writer for each engine, segments closed as they end, what is too old dropped.

Closing and dropping are a thread's of their own: the readers only write to journals.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TextIO

from ..base.errors import KvscopeError
from ..base.supervision import SupervisedThread, Supervisor
from ..contract.samples import Observed
from ..ledger.engine_ledger import EngineLedger, Point
from ..sources.live_stream import Received
from .segment_files import ClosedSegment, closed_segments, directory_of, history_segments
from .segment_writer import Writer, add_points

if TYPE_CHECKING:
    from .archiver import Archiver

logger = logging.getLogger(__name__)

RETENTION_EVERY_S: Final = 60.0
"""Between looks for what is too old."""
REPORT_DELETION_S: Final = 60.0
"""A deleted directory is reported for this long, though the service makes it again at once."""
LOCK_FILE: Final = ".lock"
CLOSE_WITHIN_S: Final = 300.0
"""For one segment: minutes of a busy disk."""


class HistoryInUse(KvscopeError, ValueError):
    """Another service keeps its history there."""


class Keep(NamedTuple):
    """How much is kept: what is younger than `days`, and no more than `bytes` of all engines together."""

    days: float = 7.0
    bytes: int = 10 << 30


class Keeper:
    """Keeps history under `directory`, which is made if missing. `start` it, and `stop` it when the readers have ended.

    `archiver` is woken as segments are closed. Segments that it has not copied yet outlive `keep.days`, and
    `keep.bytes` as long as deleting other segments is enough. Raises HistoryInUse, and ValueError if the directory
    cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        keep: Keep,
        archiver: Archiver | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        self.directory = directory
        self.keep_no_more_than = keep
        self.archiver = archiver
        try:
            self._held = self._lock_directory()
            make_private(directory)
        except OSError as error:
            raise ValueError(
                f"{directory} cannot be written: {error.strerror}. Name another directory with --data"
            ) from error
        self._deleted_s = 0.0
        self._writers: dict[str, Writer] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._looked_s = 0.0
        self._thread = SupervisedThread(
            "the keeper of history", "history", self._turn, supervisor or Supervisor(), within_s=CLOSE_WITHIN_S
        )
        self._tidy_up()

    def add_points(self, points: Mapping[str, Sequence[Point]]) -> None:
        """Write the last points of each engine that a killed service had not written. Call it before `start`."""
        for engine, missing in points.items():
            with contextlib.suppress(OSError):  # the writer of the engine reports a disk that is full
                add_points(directory_of(self.directory, engine), missing)

    def start(self) -> None:
        """Begin to close what has ended, and to drop what is too old."""
        self._thread.start()
        if self.archiver is not None:
            self.archiver.start()

    def stop(self, ledgers: Iterable[EngineLedger]) -> None:
        """Finish what is open, and wait for what is just being closed."""
        for ledger in ledgers:
            if ledger.engine in self._writers:
                self._writers[ledger.engine].stop(ledger)
        self._thread.stop()
        if self.archiver is not None:
            self.archiver.stop()
        self._held.close()

    def keep(self, received: Sequence[Received], ledger: EngineLedger | None) -> None:
        """Keep what a stream has brought, before `ledger`, its engine's, is fed it."""
        engine = ledger.engine if ledger is not None else received[0].frame.engine if received else ""
        if engine:
            self._writer(engine).keep(received, ledger)

    def note(self, records: Sequence[Observed]) -> None:
        """Keep what a page has brought."""
        for engine in dict.fromkeys(record.engine for record in records):
            self._writer(engine).note([record for record in records if record.engine == engine])

    def end(self, engine: str, ledger: EngineLedger | None) -> None:
        """Finish what is open of an engine that is not followed any more."""
        with self._lock:
            writer = self._writers.pop(engine, None)
        if writer is not None:
            writer.end(ledger)

    def error(self, engine: str) -> str:
        """Why nothing can be kept of it just now, or an empty string if all is well."""
        writer = self._writers.get(engine)
        return writer.error if writer is not None else ""

    def problem(self) -> str:
        """Return why history is not kept as it should be, or was not within the last minute, or an empty string if all
        is well.

        A directory that was deleted is made and locked again. One thread only.
        """
        problems = []
        with self._lock:
            writers = list(self._writers.values())
        if any(writer.is_gone for writer in writers) or self._is_lock_gone():
            self._deleted_s = time.monotonic()
            with contextlib.suppress(OSError, HistoryInUse):
                if self._is_lock_gone():
                    held, self._held = self._held, self._lock_directory()
                    held.close()
        deleted_s = max([self._deleted_s, *(writer.deleted_s for writer in writers)])
        if deleted_s and time.monotonic() - deleted_s < REPORT_DELETION_S:
            problems.append(
                f"{self.directory} was deleted or moved: a new history begins, with the events that are in memory"
            )
        if not os.access(self.directory, os.W_OK):
            problems.append(f"{self.directory} cannot be written")
        problems += dict.fromkeys(writer.error for writer in writers if writer.error)
        return "; ".join(problems)

    def _is_lock_gone(self) -> bool:
        try:
            return not os.path.samestat(os.stat(self.directory / LOCK_FILE), os.fstat(self._held.fileno()))
        except FileNotFoundError:
            return True

    def _lock_directory(self) -> TextIO:
        """Make the directory and lock it. Raises OSError and HistoryInUse."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        held = (self.directory / LOCK_FILE).open("w")
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            held.close()
            raise HistoryInUse(
                f"another service keeps its history in {self.directory}: name another with --data"
            ) from None
        return held

    def _writer(self, engine: str) -> Writer:
        with self._lock:
            if engine not in self._writers:
                self._writers[engine] = Writer(directory_of(self.directory, engine), self._close_soon)
            return self._writers[engine]

    def _close_soon(self, path: Path) -> None:
        self._ended.put(path)
        self._thread.wake()

    # ---------------------------------------------------------------- the thread

    def _tidy_up(self) -> None:
        """Clean up after an earlier service: segments half written, written twice, or still open."""
        for half in [*self.directory.glob("*/*/.*"), *self.directory.glob("*/.*")]:
            shutil.rmtree(half, ignore_errors=True)
        for path in self.directory.glob("*/*.kvj"):
            if any(segment.path == path for segment in history_segments(path.parent)):
                self._ended.put(path)
            else:
                path.unlink()

    def _turn(self) -> float:
        """Drop what is too old, and close one segment. One that cannot be closed stays a journal, which can be read
        too.
        """
        if time.monotonic() - self._looked_s >= RETENTION_EVERY_S:
            self._looked_s = time.monotonic()
            self.drop(time.time_ns())
        try:
            path = self._ended.get_nowait()
        except queue.Empty:
            return RETENTION_EVERY_S
        from .sealed_segment import close  # a service that keeps nothing needs no Parquet

        close(path, path.parent)
        if self.archiver is not None:
            self.archiver.wake()
        return 0.0

    def drop(self, now_ns: int) -> None:
        """Remove what is older than is kept, and the oldest of what is more."""
        closed: list[tuple[ClosedSegment, int]] = []
        size = 0
        for engine in self.directory.iterdir() if self.directory.is_dir() else ():
            size += sum(path.stat().st_size for path in engine.glob("*.kvj"))
            closed += [
                (segment, sum(path.stat().st_size for path in segment.path.iterdir()))
                for segment in closed_segments(engine)
            ]
        size += sum(bytes_ for _, bytes_ in closed)
        oldest_ns = now_ns - round(self.keep_no_more_than.days * 86_400e9)
        order = sorted(
            (self.archiver is not None and not self.archiver.has(segment), segment.to_ns, segment, bytes_)
            for segment, bytes_ in closed
        )
        for is_only_here, to_ns, segment, bytes_ in order:
            is_too_much = size > self.keep_no_more_than.bytes
            if not is_too_much and (is_only_here or to_ns >= oldest_ns):
                continue
            size -= bytes_
            _delete_segment(segment)
            if is_only_here and self.archiver is not None:
                self.archiver.lost(segment)


def _delete_segment(segment: ClosedSegment) -> None:
    gone = segment.path.with_name(f".{segment.path.name}")  # all of it at once
    segment.path.rename(gone)
    shutil.rmtree(gone)
    if not any(gone.parent.iterdir()):
        gone.parent.rmdir()


def make_private(directory: Path) -> None:
    """Take from others what an earlier release let them read. Files of another user remain unchanged."""
    for path in (directory, *directory.rglob("*")):
        with contextlib.suppress(OSError):
            mode = path.stat(follow_symlinks=False).st_mode
            if mode & 0o077 and not path.is_symlink():
                path.chmod(mode & 0o700)
