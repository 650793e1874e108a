"""Keeps what a source brings as a recording: a journal of its frames, samples, facts and KV events."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.status import Status

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.events.journal import JournalWriter, journal_segments
from kvscope.monitor.events.sample_codec import encode_observed
from kvscope.monitor.events.samples import Record
from kvscope.monitor.events.wire import Batch, Keyframe
from kvscope.monitor.sources.source import POLL_WAIT_S, Source, SourceError, SourceOptions
from kvscope.monitor.sources.source_registry import is_service, open_source
from kvscope.monitor.text import escaped


class Recorded(NamedTuple):
    """The result of a recording."""

    engine: str
    batches: int
    bytes: int
    others: int = 0
    """Samples, facts and KV events."""


class JournalRecorder:
    """Writes records into `directory`, each epoch of an engine into a segment of its own. Raises BadTarget if the
    directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.batches = self.others = self.bytes = 0
        self.engine = ""
        self._directory = directory
        self._writer: JournalWriter | None = None

    def write(self, source: Source, records: Sequence[Record]) -> None:
        """Write records that `source` has just brought."""
        for record in records:
            is_frame = isinstance(record, Batch | Keyframe)
            payload = source.payload_of(record) if isinstance(record, Batch | Keyframe) else encode_observed(record)
            sequence = record.sequence if isinstance(record, Batch | Keyframe) else 0
            epoch = record.epoch if isinstance(record, Batch | Keyframe) else 0
            if self._writer is None or epoch > self._writer.epoch:
                self.close()
                self._writer = self._open(epoch or time.time_ns())
            self._writer.append(payload, sequence)
            self.engine = self.engine or record.engine
            self.batches += isinstance(record, Batch)
            self.others += not is_frame
            self.bytes += len(payload)

    def close(self) -> None:
        """Finish the open segment."""
        if self._writer is not None:
            self._writer.close()

    def _open(self, epoch: int) -> JournalWriter:
        try:
            return JournalWriter(self._directory, epoch)
        except OSError as error:
            raise BadTarget(f"{self._directory} cannot be written: {error.strerror}. Name another directory") from error

    @property
    def has_begun(self) -> bool:
        """Whether anything was written."""
        return self._writer is not None


def record(target: str, directory: Path, *, seconds: float | None, timeout_s: float, console: Console) -> Recorded:
    """Record what `target` brings into `directory` for `seconds` from its first record, or until Ctrl-C.

    A restart of the engine begins a new segment. Raises BadTarget if the target cannot be recorded or the directory
    holds a recording already or cannot be written, and SourceError or ContractError if nothing comes in `timeout_s`.
    """
    if is_service(target):
        raise BadTarget(f"{target} is a kvscope service: record what it reads (its page Sources lists it)")
    source = open_source(target, SourceOptions(timeout_s=timeout_s, follow=True, look_back_s=None))
    recorder = JournalRecorder(directory)
    with closing(source), closing(recorder):
        if not source.grows:
            raise BadTarget(f"{target} is over, and is kept already: copy it. A source that goes on can be recorded")
        if directory.is_dir() and journal_segments(directory):
            raise BadTarget(f"{directory} holds a recording already: name a new directory, so that two are not mixed")
        with contextlib.suppress(KeyboardInterrupt), console.status("") as status:
            _record_until(source, recorder, seconds, timeout_s, status)
    return Recorded(recorder.engine, recorder.batches, recorder.bytes, recorder.others)


def _record_until(
    source: Source, recorder: JournalRecorder, seconds: float | None, timeout_s: float, status: Status
) -> None:
    source.open()
    started = time.monotonic()
    while seconds is None or not recorder.has_begun or time.monotonic() - started < seconds:
        had_begun = recorder.has_begun
        recorder.write(source, source.poll(POLL_WAIT_S))
        if recorder.has_begun and not had_begun:
            started = time.monotonic()
        elif not recorder.has_begun and (source.status().error or time.monotonic() - started > timeout_s):
            raise SourceError(source.status().error or source.explain_silence(timeout_s))
        kept = f"{recorder.batches:,} batches, {recorder.others:,} samples and facts, {recorder.bytes:,} bytes"
        status.update(f"{escaped(recorder.engine) or source.status().target}: {kept}; Ctrl-C ends it")
