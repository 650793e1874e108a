"""The history that a service keeps: a writer for each engine, segments closed as they end, what is too old dropped.

Closing and dropping are a thread's of their own: the readers only write to journals.
"""

from __future__ import annotations

import fcntl
import logging
import queue
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events.sample_codec import Observed
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import ClosedSegment, closed_segments, directory_of, history_segments
from kvscope.monitor.history.segment_writer import Writer
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.live_stream import Received

logger = logging.getLogger(__name__)

RETENTION_EVERY_S: Final = 60.0
"""Between looks for what is too old."""


class HistoryInUse(KvscopeError, ValueError):
    """Another service keeps its history there."""


class Keep(NamedTuple):
    """How much is kept: what is younger than `days`, and no more than `bytes` of all engines together."""

    days: float = 7.0
    bytes: int = 10 << 30


class Keeper:
    """Keeps history under `directory`, which is made if missing. `start` it, and `stop` it when the readers have ended.

    Raises HistoryInUse, and ValueError if the directory cannot be written.
    """

    def __init__(self, directory: Path, keep: Keep) -> None:
        self.directory = directory
        self.keep_no_more_than = keep
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._held = (directory / ".lock").open("w")
        except OSError as error:
            raise ValueError(
                f"{directory} cannot be written: {error.strerror}; name another directory with --data"
            ) from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise HistoryInUse(f"another service keeps its history in {directory}: name another with --data") from None
        self._writers: dict[str, Writer] = {}
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-history", daemon=True)
        self._tidy_up()

    def start(self) -> None:
        """Begin to close what has ended, and to drop what is too old."""
        self._thread.start()

    def stop(self, ledgers: Iterable[EngineLedger]) -> None:
        """Finish what is open, and wait for what is just being closed."""
        for ledger in ledgers:
            if ledger.engine in self._writers:
                self._writers[ledger.engine].stop(ledger)
        self._stopping.set()
        self._ended.put(Path())  # wakes it
        if self._thread.ident is not None:
            self._thread.join()
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

    def error(self, engine: str) -> str:
        """Why nothing can be kept of it just now; empty if all is well."""
        writer = self._writers.get(engine)
        return writer.error if writer is not None else ""

    def _writer(self, engine: str) -> Writer:
        with self._lock:
            if engine not in self._writers:
                self._writers[engine] = Writer(directory_of(self.directory, engine), self._ended.put)
            return self._writers[engine]

    # ---------------------------------------------------------------- the thread

    def _tidy_up(self) -> None:
        """What a service before this one has left: half written, written twice, or still open."""
        for half in [*self.directory.glob("*/*/.*"), *self.directory.glob("*/.*")]:
            shutil.rmtree(half, ignore_errors=True)
        for path in self.directory.glob("*/*.kvj"):
            if any(segment.path == path for segment in history_segments(path.parent)):
                self._ended.put(path)
            else:
                path.unlink()

    def _run(self) -> None:
        looked_s = 0.0
        while not self._stopping.is_set():
            try:
                if time.monotonic() - looked_s >= RETENTION_EVERY_S:
                    looked_s = time.monotonic()
                    self.drop(time.time_ns())
                path = self._ended.get(timeout=RETENTION_EVERY_S)
                if not self._stopping.is_set():
                    close(path, path.parent)
            except queue.Empty:
                continue
            except Exception:  # a segment that cannot be closed stays a journal, which can be read too
                logger.exception("a segment of the history could not be closed and stays open")

    def drop(self, now_ns: int) -> None:
        """Remove what is older than is kept, and the oldest of what is more."""
        closed: list[tuple[ClosedSegment, int]] = []
        size = 0
        for engine in self.directory.iterdir() if self.directory.is_dir() else ():
            size += sum(path.stat().st_size for path in engine.glob("*.kvj"))
            closed += [(segment, _size_on_disk(segment.path)) for segment in closed_segments(engine)]
        size += sum(bytes_ for _, bytes_ in closed)
        oldest_ns = now_ns - round(self.keep_no_more_than.days * 86_400e9)
        for segment, bytes_ in sorted(closed, key=lambda each: each[0].to_ns):
            if segment.to_ns >= oldest_ns and size <= self.keep_no_more_than.bytes:
                break
            size -= bytes_
            gone = segment.path.with_name(f".{segment.path.name}")  # all of it at once
            segment.path.rename(gone)
            shutil.rmtree(gone)
            if not any(gone.parent.iterdir()):
                gone.parent.rmdir()


def _size_on_disk(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())
