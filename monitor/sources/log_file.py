"""An engine's log as a file: plain or gzip, read to its end, or followed as it grows and is rotated.

A file without a line of statistics is read as a report in prose (kvscope.monitor.sources.incident_report).
"""

from __future__ import annotations

import codecs
import gzip
import os
import time
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events import limits
from kvscope.monitor.events.samples import Fact, Record, ReportedEvent, Sample
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.incident_report import stated_facts
from kvscope.monitor.sources.log_inputs import LogInput, file_input
from kvscope.monitor.sources.read_progress import ReadProgress
from kvscope.monitor.sources.source import POLL_WAIT_S, Source, SourceError, SourceOptions, SourceStatus
from kvscope.monitor.sources.targets import TargetKind

GZIP: Final = b"\x1f\x8b"
UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
"""A redirection in PowerShell begins its file with one of these."""
MAX_LINE: Final = 1 << 16
MAX_PROSE: Final = 20_000
"""Lines: no report is longer."""
CHUNK_BYTES: Final = 1 << 20
"""How much of a file one poll reads."""
NO_STATISTICS: Final = (
    "no line has an engine's figures (Avg prompt throughput: …, Running: …, KV cache usage: …). They are logged every"
    " 10 s while requests run, unless --disable-log-stats is given"
)


def read_log(path: Path | LogInput) -> tuple[Log, list[Sample | Fact | ReportedEvent]]:
    """Return the contents of a log file. Bytes that are no text are replaced, and damage is in its notes.

    Raises BadTarget if nothing of it can be read.
    """
    try:
        text = file_input(path) if isinstance(path, Path) else path
        log = Log(text.name, text.ended)
        return log, list(log.records(lines_of(path, log.notes)))
    except OSError as error:
        raise BadTarget(f"{path if isinstance(path, Path) else path.name}: cannot be read: {error}") from error


def read_prose(path: Path | LogInput, log: Log, records: Sequence[Record]) -> list[Record]:
    """Return `records`, and the facts that only prose has, of the engine that it is about. `log` is what read_log
    returned.

    Raises BadTarget if the file is gone.
    """
    try:
        stated = stated_facts(islice(lines_of(path, []), MAX_PROSE))
    except OSError as error:
        raise BadTarget(f"{log.name}: cannot be read: {error}") from error
    if not stated:
        return list(records)
    before = log.engine()
    log.name_by({name: value for _, name, value in stated})
    engine = log.engine()
    return [
        *(msgspec.structs.replace(record, engine=engine) if record.engine == before else record for record in records),
        *(Fact(engine, f"{log.name}:{line}", name, value) for line, name, value in stated),
    ]


def lines_of(path: Path | LogInput, notes: list[str]) -> Iterator[str]:
    """Yield the lines of a text, plain or gzip, as far as they can be read. `notes` takes why reading stopped early.

    A line of more than MAX_LINE characters comes in parts. Raises OSError.
    """
    packed_bytes = path.stat().st_size if isinstance(path, Path) else path.packed_bytes
    left = packed_bytes * limits.LOG_RATIO + limits.LOG_SLACK_BYTES
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise OSError(f"it is a damaged zip: {error}") from error
    encoding = "utf-16" if head in UTF_16 else "utf-8"
    got_any = False
    with path.open("rb") as raw, ExitStack() as stack:
        binary = stack.enter_context(gzip.GzipFile(fileobj=raw)) if head == GZIP else raw
        text = stack.enter_context(TextIOWrapper(cast(BinaryIO, binary), encoding, "replace"))
        progress = stack.enter_context(ReadProgress(path.name, cast(BinaryIO, raw)))
        try:
            while line := text.readline(MAX_LINE):
                got_any = True
                left -= len(line)
                if left < 0:
                    most = f"{limits.LOG_RATIO} times its packed size"
                    notes.append(f"it unpacks to more than {most}, as no log does, and was read up to there")
                    return
                progress.count_line()
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
            if not got_any:
                raise OSError(f"it is a damaged gzip or zip: {error}") from error
            notes.append(f"it is a gzip that is cut short or damaged, and was read up to there ({error})")


class LogFile(Source):
    """The log at `path`. Raises BadTarget if it cannot be read."""

    has_past = True

    def __init__(self, path: Path, options: SourceOptions) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self.grows = file.read(2) != GZIP
        except OSError as error:
            raise BadTarget(f"{path}: cannot be read: {error.strerror}") from error
        self._follow = options.follow and self.grows
        self._look_back_s = options.look_back_s if options.follow else None
        self._lines = GrowingFile(path)
        self._log: Log | None = None
        self._past: list[Record] | None = None
        self._caught_up = False
        self._error = ""
        self._engines: tuple[str, ...] = ()
        self._last_ns = 0
        self._is_log = False

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what the file reports: all of it at once, or when followed what was added."""
        records = self._poll_growth(timeout_s) if self._follow else self._poll_past()
        self._engines = tuple(dict.fromkeys((*self._engines, *(record.engine for record in records))))
        self._last_ns = max((record.at_ns or 0 for record in records if isinstance(record, Sample)), default=0) or (
            self._last_ns
        )
        return records

    def status(self) -> SourceStatus:
        """Report how the file is. Its kind is known once it was read."""
        prose = self._caught_up and not self._is_log and not self._follow
        return SourceStatus(
            target=str(self._path),
            kind=TargetKind.PROSE if prose else TargetKind.LOG,
            engines=self._engines,
            in_step=self._caught_up and (self._is_log or not self._follow),
            ended=self._caught_up and not self._follow,
            error=self._error,
            last_seen_ns=self._last_ns,
            notes=tuple(self._log.notes) if self._log is not None else (),
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last time that a line has. Raises SourceError if none has one."""
        times = [record.at_ns for record in self._read() if isinstance(record, Sample | Fact) and record.at_ns]
        if not times:
            raise SourceError(
                f"{self._path}: no line has a time, so that what was between --since and --until is not known"
            )
        return min(times), max(times)

    def explain_silence(self, seconds: float) -> str:
        """Explain what a log must have."""
        return f"{self._path}: {NO_STATISTICS}"

    # ---------------------------------------------------------------- all of it

    def _poll_past(self) -> Sequence[Record]:
        if self._caught_up:
            return []
        records = self._read()
        self._caught_up = True
        return records if self._look_back_s is None else _latest(records, self._look_back_s)

    def _read(self) -> list[Record]:
        if self._past is None:
            self._log, records = read_log(self._path)
            self._is_log = bool(self._log.stats_lines or self._log.described_states)
            self._past = [*records] if self._log.stats_lines else read_prose(self._path, self._log, records)
        return self._past

    # ---------------------------------------------------------------- as it grows

    def _poll_growth(self, timeout_s: float) -> Sequence[Record]:
        if self._log is None:
            self._log = Log(self._path.name, datetime.now(UTC))
        records: list[Record] = []
        try:
            lines, more = self._lines.read()
            self._error = ""
            records += self._log.records(lines, grows=True)
            while more and not self._caught_up:  # the past, at once
                lines, more = self._lines.read()
                records += self._log.records(lines, grows=True)
        except OSError as error:
            self._error = f"{self._path}: cannot be read now: {error.strerror}. The next read follows"
            more = False
        self._is_log = self._is_log or bool(self._log.stats_lines)
        if not self._caught_up:
            self._caught_up = True
            return records if self._look_back_s is None else _latest(records, self._look_back_s)
        if not more and not records:
            time.sleep(timeout_s)
        return records


def _latest(records: Sequence[Record], seconds: float) -> list[Record]:
    """Return the facts, and the samples of the last `seconds` before the last of them."""
    last_ns = max((record.at_ns or 0 for record in records if isinstance(record, Sample)), default=0)
    from_ns = last_ns - seconds * 1e9
    return [record for record in records if not isinstance(record, Sample) or (record.at_ns or last_ns) >= from_ns]


class GrowingFile:
    """The lines of a text file that another process appends to, rotates or truncates."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._decoder: codecs.IncrementalDecoder | None = None
        self._rest = ""

    def read(self) -> tuple[list[str], bool]:
        """Return the whole lines of the next CHUNK_BYTES, and whether more may be there already. Raises OSError."""
        if self._file is None:
            self._file = self.path.open("rb")
            self._decoder, self._rest = None, ""
        data = self._file.read(CHUNK_BYTES)
        if not data:
            return [], self._reopened()
        if self._decoder is None:
            encoding = "utf-16" if data[:2] in UTF_16 else "utf-8"
            self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        if len(self._rest) >= MAX_LINE:
            lines.append(self._rest)
            self._rest = ""
        return lines, len(data) == CHUNK_BYTES

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopened(self) -> bool:
        """Begin again where the path names another file now, or the file was truncated. Raises OSError."""
        assert self._file is not None
        there, ours = self.path.stat(), os.fstat(self._file.fileno())
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino) and there.st_size >= self._file.tell():
            return False
        self.close()
        return True
