"""Determines by its form or content what a target on the command line is, without connecting anywhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events import journal
from kvscope.monitor.sources.log_inputs import STANDARD_INPUT, holds_texts
from kvscope.monitor.sources.support_bundle import ZIP, is_bundle

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


def _kind_of_path(target: str) -> TargetKind:
    path = Path(target)
    if target == STANDARD_INPUT:
        return TargetKind.LOG
    if target and path.is_dir():
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
    if not target or not path.exists():
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
