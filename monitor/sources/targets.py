"""Tells what a target on the command line is, and reads the ones that are files.

tcp://… ipc://…        an engine's event stream, kvscope's or (its first message tells) vLLM's KV events
http(s)://…/kv_event_sources  a vLLM that tells where its KV events are
http(s)://…/metrics    a metrics page
any other http(s)://…  a kvscope service
a directory            a recording
a file                 is looked into: a segment of a recording, a support bundle, the text of a log (gzip too), or a
                       report in prose
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from enum import Enum
from io import BufferedReader, TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from kvscope.monitor.errors import BadTarget as BadTarget
from kvscope.monitor.events import journal
from kvscope.monitor.events.samples import Fact, Sample
from kvscope.monitor.sources.engine_log import Log
from kvscope.monitor.sources.incident_report import told_in
from kvscope.monitor.sources.support_bundle import ZIP

SOURCES_PATH: Final = "/kv_event_sources"
"""Where a vLLM tells where it publishes KV events."""
GZIP: Final = b"\x1f\x8b"
UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")
"""What a redirection in PowerShell writes begins with one of these."""
MAX_LINE: Final = 1 << 16
MAX_PROSE: Final = 20_000
"""Lines: nobody writes a report that is longer."""


class Kind(Enum):
    """What a target is."""

    STREAM = "stream"
    KV_EVENTS = "kv-events"
    METRICS = "metrics"
    SERVICE = "service"
    RECORDING = "recording"
    BUNDLE = "bundle"
    LOG = "log"
    PROSE = "prose"
    """A log by its looks, until it is read and has no engine's figures."""
    PROMETHEUS = "prometheus"
    """Never told from a target: the past of a server is asked for by --prometheus."""


def kind_of(target: str) -> Kind:
    """What `target` is. Raises BadTarget if it is nothing we know, a directory without a recording, not there, or
    cannot be read.
    """
    if target.startswith("tcp://"):
        port = target.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise BadTarget(f"{target} names no port from 1 to 65535: an event stream looks like tcp://127.0.0.1:5757")
        return Kind.STREAM
    if target.startswith("ipc://"):
        return Kind.STREAM
    if target.startswith(("http://", "https://")):
        address = target.partition("?")[0].rstrip("/")
        if address.endswith(SOURCES_PATH):
            return Kind.KV_EVENTS
        return Kind.METRICS if address.endswith("/metrics") else Kind.SERVICE
    try:
        return _kind_of_path(target)
    except OSError as error:
        raise BadTarget(f"{error.filename or target}: cannot be read: {error.strerror}") from error


def _kind_of_path(target: str) -> Kind:
    path = Path(target)
    if target and path.is_dir():
        segments = journal.segments(path)
        if not segments:
            raise BadTarget(f"{path} holds no recording: no file in it is named EPOCH-SEQUENCE{journal.SUFFIX}")
        for segment in segments:
            segment.path.open("rb").close()  # one that may not be read is told before anything is looked at
        return Kind.RECORDING
    if not target or not path.exists():
        raise BadTarget(
            f"{target or repr(target)}: there is no such file or directory. A target is an event stream (tcp://127.0.0.1:5757),"
            " a metrics page (http://127.0.0.1:8000/metrics), a kvscope service (http://127.0.0.1:8765), a recording"
            " (a directory) or an engine's log (a file)"
        )
    with path.open("rb") as file:
        head = file.read(len(journal.HEADER))
    if head.startswith(ZIP):
        return Kind.BUNDLE
    return Kind.RECORDING if head == journal.HEADER else Kind.LOG


def read_log(path: Path) -> tuple[Log, list[Sample | Fact]]:
    """Everything that a log file says; bytes that are no text are replaced, and what is damaged is named in its notes.

    Raises BadTarget if nothing of it can be read.
    """
    try:
        log = Log(path.name, datetime.fromtimestamp(path.stat().st_mtime, UTC))
        return log, list(log.records(lines_of(path, log.notes)))
    except OSError as error:
        raise BadTarget(f"{path}: cannot be read: {error}") from error


def read_prose(path: Path, log: Log, facts: Sequence[Fact]) -> list[Fact]:
    """The same `facts`, and those that only prose has, of the engine that it is about. `log` is what read_log gave.

    Raises BadTarget if the file is gone.
    """
    try:
        told = told_in(islice(lines_of(path, []), MAX_PROSE))
    except OSError as error:
        raise BadTarget(f"{path}: cannot be read: {error}") from error
    if not told:
        return list(facts)
    log.name_by({name: value for _, name, value in told})
    engine = log.engine()
    return [msgspec.structs.replace(fact, engine=engine) for fact in facts] + [
        Fact(engine, f"{log.name}:{line}", name, value) for line, name, value in told
    ]


def lines_of(path: Path, notes: list[str]) -> Iterator[str]:
    """The lines of a file, plain or gzip, as far as they can be read; `notes` takes what kept us from reading on.

    A line of more than MAX_LINE characters comes in parts. Raises OSError.
    """
    with path.open("rb") as file:
        head = file.read(2)
    encoding = "utf-16" if head in UTF_16 else "utf-8"
    got_any = False
    opened: gzip.GzipFile | BufferedReader = gzip.open(path, "rb") if head == GZIP else path.open("rb")  # noqa: SIM115 - it is, below
    with opened as binary, TextIOWrapper(binary, encoding, "replace") as text:
        try:
            while line := text.readline(MAX_LINE):
                got_any = True
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if not got_any:
                raise OSError(f"it is a damaged gzip: {error}") from error
            notes.append(f"it is a gzip that is cut short or damaged, and was read up to there ({error})")
