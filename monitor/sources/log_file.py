"""An engine's log as a source: one file, read to its end or followed as it grows and is rotated, or several texts.

A file is plain or gzip. Several texts are a directory or a zip of logs, and standard input is one. A text without a
line of statistics is read as a report in prose (kvscope.monitor.sources.incident_report). While a large text is read,
one line on standard error shows how far it is, if that is a terminal.
"""

from __future__ import annotations

import codecs
import gzip
import os
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import cached_property
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, TextIO, cast

import msgspec

from ..base import limits
from ..base.errors import BadTarget
from ..base.text import counted
from ..contract.samples import Fact, Record, ReportedEvent, Sample
from .engine_log import Log
from .incident_report import stated_facts
from .line_order import FROM_ITS_END, StoredLines, text_streams
from .source import POLL_WAIT_S, Source, SourceError, SourceStatus
from .targets import MOST_TEXTS, LogInput, TargetKind, file_input

LARGE_BYTES: Final = 32 << 20
"""A smaller text takes a few seconds at most."""
REFRESH_S: Final = 0.5
LINES_BETWEEN_LOOKS: Final = 1 << 12


class ReadProgress:
    """Shows how much of `file` has been read, of a gzip its compressed bytes. Shows nothing for a text that is not
    large, or where `stream` is no terminal.
    """

    def __init__(self, name: str, file: BinaryIO, stream: TextIO | None = None) -> None:
        self._name = name
        self._file = file
        self._stream = stream if stream is not None else sys.stderr
        self._size = _size_of(file)
        self._is_shown = self._size >= LARGE_BYTES and self._stream is not None and self._stream.isatty()
        self._lines = 0
        self._width = 0
        self._next_s = time.monotonic() + REFRESH_S

    def __enter__(self) -> ReadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._width:
            self._write("")

    def count_line(self) -> None:
        """Note that a line was read, and refresh what is shown if it is time."""
        self._lines += 1
        if not self._is_shown or self._lines % LINES_BETWEEN_LOOKS:
            return
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + REFRESH_S
            share = min(self._file.tell() / self._size, 1.0)
            self._write(f"reading {self._name}: {share:.0%} of {self._size >> 20:,} MiB")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r{text:{self._width}}\r{text}")
        self._stream.flush()
        self._width = len(text)


def _size_of(file: BinaryIO) -> int:
    """Return the size of a file that is at its beginning, 0 if it has none."""
    if not file.seekable():
        return 0
    size = file.seek(0, 2)
    file.seek(0)
    return size


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


LogRecord = Sample | Fact | ReportedEvent
MOST_RECORDS: Final = 10_000
"""Samples that one poll brings, so that a log of any size takes a bounded part of memory."""


def read_log(path: Path | LogInput) -> tuple[Log, list[LogRecord]]:
    """Return the contents of a log file, as LogReading.records does."""
    reading = LogReading(path)
    records = list(reading.records())
    return reading.log, records


class LogReading:
    """One text as it is read. Bytes that are no text are replaced, and damage is in the notes of the log."""

    def __init__(self, path: Path | LogInput) -> None:
        self._path = path
        self._logs: list[Log] = []
        self._notes: list[str] = []

    def records(self) -> Iterator[LogRecord]:
        """Yield its records. Raises BadTarget if nothing of it can be read."""
        path = self._path
        try:
            text = file_input(path) if isinstance(path, Path) else path
            with StoredLines() as stored:
                for label, lines, from_its_end in text_streams(lines_of(path, self._notes), text.ended, stored):
                    name = f"{text.name}{FROM_ITS_END}" if from_its_end else text.name
                    self._logs.append(Log(name, text.ended, label))
                    yield from self._logs[-1].records_of(lines)
        except OSError as error:
            raise BadTarget(f"{path if isinstance(path, Path) else path.name}: cannot be read: {error}") from error

    def all_records(self) -> Iterator[Record]:
        """Yield the same, and the facts that only prose has. A report is short: until a line of statistics shows that
        it is none, its records are kept back. Raises BadTarget.
        """
        kept: list[LogRecord] | None = []
        for record in self.records():
            if kept is not None and (self.has_statistics or len(kept) >= MAX_PROSE):
                yield from kept if self.has_statistics else read_prose(self._path, self._logs[0], kept)
                kept = None
            if kept is None:
                yield record
            else:
                kept.append(record)
        if kept is not None:
            yield from read_prose(self._path, self.log, kept)

    @property
    def has_statistics(self) -> bool:
        """Whether a line of statistics was read so far."""
        return any(log.stats_lines for log in self._logs)

    @cached_property
    def log(self) -> Log:
        """The first of the text's logs, with the notes and counts of all. Ask for it once the text was read."""
        return _whole(self._logs, self._notes)


def _whole(logs: Sequence[Log], notes: Sequence[str]) -> Log:
    first = logs[0]
    for log in logs[1:]:
        first.stats_lines += log.stats_lines
        first.described_states += log.described_states
    found = [*notes, *dict.fromkeys(note for log in logs for note in log.notes)]
    if any(log.name.endswith(FROM_ITS_END) for log in logs):
        found.append("its newest lines come first: it was read from its end, and its lines are counted from there")
    if len(logs) > 1:
        found.append(f"its lines are of {counted(len(logs), 'engine')}, by their labels: each is judged by itself")
    first.notes[:] = found
    return first


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

    A line of more than MAX_LINE characters comes in parts, as far as limits.LINE_CHARS. Raises OSError.
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
            of_line, number, is_noted = 0, 1, False
            while line := text.readline(MAX_LINE):
                got_any = True
                left -= len(line)
                of_line += len(line)
                is_beyond = of_line > limits.LINE_CHARS
                if is_beyond and not is_noted:
                    is_noted = True
                    most = f"{limits.LINE_CHARS:,} characters"
                    notes.append(
                        f"line {number} has more than {most}: what is beyond, there and in other lines, is left out"
                    )
                if line.endswith("\n"):
                    of_line, number = 0, number + 1
                if left < 0:
                    most = f"{limits.LOG_RATIO} times its packed size"
                    notes.append(f"it unpacks to more than {most}, as no log does, and was read up to there")
                    return
                if not is_beyond:
                    progress.count_line()
                    yield line
        except (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile) as error:
            if not got_any:
                raise OSError(f"it is a damaged gzip or zip: {error}") from error
            notes.append(f"it is a gzip that is cut short or damaged, and was read up to there ({error})")


class GrowingLog(Source):
    """The log at `path`, followed as it grows and is rotated. look_back_s: how much of it comes first (None: all)."""

    def __init__(self, path: Path, look_back_s: float | None) -> None:
        self._path = path
        self._look_back_s = look_back_s
        self._lines = GrowingFile(path)
        self._log = Log(path.name, datetime.now(UTC))
        self._caught_up = False
        self._error = ""
        self._engines: tuple[str, ...] = ()
        self._last_ns = 0

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what was added."""
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
        if not self._caught_up:
            self._caught_up = True
            records = records if self._look_back_s is None else _latest(records, self._look_back_s)
        elif not more and not records:
            time.sleep(timeout_s)
        self._engines = tuple(dict.fromkeys((*self._engines, *(record.engine for record in records))))
        self._last_ns = _last_ns_of(records) or self._last_ns
        return records

    def status(self) -> SourceStatus:
        """Report how the file is."""
        return SourceStatus(
            target=str(self._path),
            kind=TargetKind.LOG,
            engines=self._engines,
            in_step=self._caught_up and bool(self._log.stats_lines),
            error=self._error,
            last_seen_ns=self._last_ns,
            notes=tuple(self._log.notes),
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def explain_silence(self, seconds: float) -> str:
        """Explain what a log must have."""
        return f"{self._path}: {NO_STATISTICS}"


def _last_ns_of(records: Sequence[Record]) -> int:
    return max((record.at_ns or 0 for record in records if isinstance(record, Sample)), default=0)


def _latest(records: Sequence[Record], seconds: float) -> list[Record]:
    """Return the facts, and the samples of the last `seconds` before the last of them."""
    last_ns = _last_ns_of(records)
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


NAMED: Final = 5
"""How many of the texts the notes name."""


class LogTexts(Source):
    """The texts that `inputs` returns, each read by itself: their engines and line numbers stay apart.

    look_back_s: how much of them before their last sample is brought (None: all).
    """

    has_past = True

    def __init__(
        self,
        target: str,
        inputs: Callable[[], Sequence[Path | LogInput]],
        look_back_s: float | None = None,
        *,
        grows: bool = True,
    ) -> None:
        self.grows = grows
        self._target = target
        self._inputs = inputs
        self._look_back_s = look_back_s
        self._texts: Sequence[Path | LogInput] = ()
        self._past: Iterator[Record] | None = None
        self._ended = False
        self._is_log = False
        self._notes: list[str] = []
        self._engines: tuple[str, ...] = ()
        self._last_ns = 0

    def poll(self, timeout_s: float = POLL_WAIT_S) -> Sequence[Record]:
        """Return what the texts report next, or all of it if only its end is asked for. Raises BadTarget if none can be
        read.
        """
        if self._ended:
            return []
        self._past = self._past if self._past is not None else self._read()
        records: list[Record] = []
        for record in self._past:
            records.append(record)
            if self._look_back_s is None and _may_pause(records):
                break
        else:
            self._ended = True
        self._engines = tuple(dict.fromkeys((*self._engines, *(record.engine for record in records))))
        self._last_ns = max(self._last_ns, _last_ns_of(records))
        return records if self._look_back_s is None else _latest(records, self._look_back_s)

    def status(self) -> SourceStatus:
        """Report how the texts are. The kind is known once they were read."""
        return SourceStatus(
            target=self._target,
            kind=TargetKind.PROSE if self._ended and not self._is_log else TargetKind.LOG,
            engines=self._engines,
            in_step=self._ended,
            ended=self._ended,
            last_seen_ns=self._last_ns,
            notes=tuple(self._notes),
        )

    def bounds(self) -> tuple[int, int]:
        """Return the first and the last time that a line has. Raises SourceError if none has one."""
        first, last = 0, 0
        for record in self._read():
            if isinstance(record, Sample | Fact) and record.at_ns:
                first, last = min(first or record.at_ns, record.at_ns), max(last, record.at_ns)
        if not first:
            raise SourceError(
                f"{self._target}: no line has a time, so that what was between --since and --until is not known"
            )
        return first, last

    def explain_silence(self, seconds: float) -> str:
        """Explain what a log must have."""
        return f"{self._target}: {NO_STATISTICS}"

    def close(self) -> None:
        """Stop reading."""
        self._past = None

    def _read(self) -> Iterator[Record]:
        """Yield the records of all texts, and take their notes."""
        self._texts = inputs = self._texts or self._inputs()
        if not inputs:
            raise BadTarget(f"{self._target} has no text in it")
        self._notes = []
        unread: list[str] = []
        for text in inputs[:MOST_TEXTS]:
            reading = LogReading(text)
            try:
                yield from reading.all_records()
            except BadTarget as error:
                unread.append(str(error))
                continue
            log = reading.log
            self._is_log = self._is_log or bool(log.stats_lines or log.described_states)
            self._notes += log.notes if len(inputs) == 1 else [f"{text.name}: {note}" for note in log.notes]
        if len(unread) == len(inputs[:MOST_TEXTS]):
            raise BadTarget(unread[0] if isinstance(inputs[0], Path) else f"{self._target}: {unread[0]}")
        self._notes += unread
        if len(inputs) > 1:
            names = ", ".join(text.name for text in inputs[:NAMED]) + (", …" if len(inputs) > NAMED else "")
            left_out = f"; {len(inputs) - MOST_TEXTS} more are left out" if len(inputs) > MOST_TEXTS else ""
            self._notes.insert(0, f"{counted(min(len(inputs), MOST_TEXTS), 'text')} were read: {names}{left_out}")


def _may_pause(records: Sequence[Record]) -> bool:
    """Whether there are enough for now. Facts are brought with those that follow, since they are judged together."""
    return len(records) >= MOST_RECORDS and isinstance(records[-1], Sample) and isinstance(records[-2], Sample)
