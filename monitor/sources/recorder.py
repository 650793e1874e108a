"""Keeps a live stream as a recording: a journal of what came, with the moments at which nothing did."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from kvscope.monitor.events.journal import JournalWriter, segments
from kvscope.monitor.events.wire import ContractError, Keyframe
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.targets import BadTarget, Kind, kind_of


class Recorded(NamedTuple):
    """What was kept."""

    engine: str
    batches: int
    bytes: int


def record(target: str, directory: Path, *, seconds: float | None, timeout_s: float, console: Console) -> Recorded:
    """Record the stream at `target` into `directory` for so long, or until Ctrl-C.

    A restart of the engine begins a new segment. Raises BadTarget if the target is no stream or the directory holds a
    recording already or cannot be written, and ContractError if nothing is heard in `timeout_s`.
    """
    if kind_of(target) is not Kind.STREAM:
        raise BadTarget(f"{target} is no event stream; one looks like tcp://127.0.0.1:5757")
    if directory.is_dir() and segments(directory):
        raise BadTarget(f"{directory} holds a recording already: name a new directory, so that two are not mixed")
    stream = LiveStream(target)
    writer: JournalWriter | None = None
    started = time.monotonic()
    batches = written = 0
    try:
        with console.status("") as status:
            while seconds is None or writer is None or time.monotonic() - started < seconds:
                for received in stream.poll(0.1):
                    frame = received.frame
                    if writer is None or frame.epoch > writer.epoch:
                        if writer is not None:
                            writer.close()
                        writer = _writer(directory, frame.epoch)
                        started = started if batches else time.monotonic()
                    writer.append(received.payload, frame.sequence)
                    batches += not isinstance(frame, Keyframe)
                    written += len(received.payload)
                if writer is None and time.monotonic() - started > timeout_s:
                    raise ContractError(f"{target}: nothing was heard for {timeout_s:.0f} s; is the engine running?")
                status.update(f"{stream.engine or target}: {batches:,} batches, {written:,} bytes; Ctrl-C ends it")
    except KeyboardInterrupt:
        pass
    finally:
        stream.close()
        if writer is not None:
            writer.close()
    return Recorded(stream.engine, batches, written)


def _writer(directory: Path, epoch: int) -> JournalWriter:
    try:
        return JournalWriter(directory, epoch)
    except OSError as error:
        raise BadTarget(f"{directory} cannot be written: {error.strerror}; name another directory") from error
