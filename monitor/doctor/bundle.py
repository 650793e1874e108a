"""Makes a support bundle: what an engine did, and what was found in it, fit to be given to somebody else."""

from __future__ import annotations

import io
import os
import platform
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console

from monitor.detectors.thresholds import Settings
from monitor.doctor import render
from monitor.doctor.observe import CannotTell, nothing_heard
from monitor.doctor.redact import Redactor
from monitor.doctor.report import Report, examine
from monitor.doctor.terminal import WIDTH
from monitor.doctor.window import ALWAYS, Span, Window, at_of
from monitor.events import snapshot
from monitor.events.journal import JournalWriter
from monitor.events.wire import MAJOR, MINOR, Batch, ContractError, Frame, Keyframe, encode
from monitor.ledger.ledger import EngineLedger
from monitor.sources.bundle import EVENTS
from monitor.sources.live import LiveStream
from monitor.sources.recording import Recording
from monitor.sources.target import BadTarget, Kind, kind_of

README: Final = """\
A support bundle of kvscope. `monitor doctor FILE` looks at it, and so does explain.

events/             what the engine did, as a journal (docs/contract.md)
report.txt          what `monitor doctor` found in it, and report.json for programs
configuration.json  what each engine said of itself
versions.json       of what made this bundle

Taken out: {out}. A name became the same word
wherever it stood, by a hash whose key was not kept. Prompts and tokens are never in an engine's events.
"""
PACKAGES: Final = ("msgspec", "pyzmq", "httpx", "rich")


class Made(NamedTuple):
    """What is in a bundle."""

    frames: int
    bytes: int
    report: Report


def make(
    target: str,
    file: Path,
    settings: Settings,
    *,
    window: Window = ALWAYS,
    watch_s: float,
    timeout_s: float,
    keep_ids: bool = False,
) -> Made:
    """Write the bundle of a recording, or of a part of it, or of what a stream says for `watch_s`, to `file`.

    Raises BadTarget for what has no events, and CannotTell; ValueError if there is such a file already, or it cannot be
    written.
    """
    if file.exists():
        raise ValueError(f"{file} is there already: name a new file")
    redactor = Redactor(os.urandom(16), keep_ids)
    with tempfile.TemporaryDirectory(prefix="kvscope-bundle-") as folder:
        directory = Path(folder)
        try:
            frames = _keep((redactor.frame(frame) for frame in _frames(target, window, watch_s, timeout_s)), directory)
        except ContractError as error:
            raise CannotTell(str(error)) from error
        if not frames:
            raise CannotTell(f"{target} has no events there")
        report = examine([folder], settings)
        shown = msgspec.json.decode(msgspec.json.encode(report).replace(folder.encode(), b"the bundle"), type=Report)
        out = "host and model names, callers' traces" + ("" if keep_ids else ", requests' ids")
        texts = {
            "README.txt": README.format(out=out),
            "report.txt": _as_text(shown),
            "report.json": _json(shown),
            "configuration.json": _json({each.engine: each.configuration for each in shown.balances}),
            "versions.json": _json(_versions()),
        }
        try:
            with zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED) as bundle:
                for name, text in texts.items():
                    bundle.writestr(name, text)
                for segment in sorted(directory.iterdir()):
                    bundle.write(segment, EVENTS + segment.name)
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}; name another file") from error
    return Made(frames, file.stat().st_size, shown)


def _frames(target: str, window: Window, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    match kind_of(target):
        case Kind.RECORDING if window == ALWAYS:
            return iter(Recording(Path(target)))
        case Kind.RECORDING:
            end_ns = max(map(at_of, Recording(Path(target))), default=0)
            return _within(Recording(Path(target)), window.span(end_ns))
        case Kind.STREAM if window == ALWAYS:
            return _live(target, watch_s, timeout_s)
        case Kind.STREAM:
            raise BadTarget(f"{target} is live and has no past: --since and --until are for a recording")
        case _:
            raise BadTarget(
                f"{target} has no events to give away: a bundle is made of a recording or of an event stream"
            )


def _live(target: str, watch_s: float, timeout_s: float) -> Iterator[Frame]:
    stream = LiveStream(target)
    started = time.monotonic()
    in_step_at = 0.0
    try:
        while not in_step_at or time.monotonic() - in_step_at < watch_s:
            yield from (received.frame for received in stream.poll(0.1))
            if not in_step_at and stream.in_step:
                in_step_at = time.monotonic()
            if not in_step_at and time.monotonic() - started > timeout_s:
                raise nothing_heard(target, bool(stream.engine), timeout_s)
    finally:
        stream.close()


def _within(frames: Iterable[Frame], span: Span) -> Iterator[Frame]:
    """Those of that time, after a keyframe of what was so before."""
    ledger: EngineLedger | None = None
    frames = iter(frames)
    for frame in frames:
        if at_of(frame) >= span.since_ns:
            frames = chain([frame], frames)
            break
        ledger = ledger or EngineLedger(frame.engine)
        ledger.apply(frame)
    if ledger is not None and ledger.ready:
        state = ledger.state
        now_ns = ledger.wall(state.now_ns)
        yield Keyframe(
            ledger.engine, ledger.epoch, ledger.sequence, state.last_step, now_ns, state.now_ns, state.damaged,
            snapshot.dump(state),
        )  # fmt: skip
    yield from (frame for frame in frames if at_of(frame) <= span.until_ns)


def _keep(frames: Iterable[Frame], directory: Path) -> int:
    """How many; each life of an engine in a segment of its own."""
    writer: JournalWriter | None = None
    count = 0
    try:
        for frame in frames:
            if writer is None or frame.epoch > writer.epoch:
                if writer is not None:
                    writer.close()
                writer = JournalWriter(directory, frame.epoch)
            writer.append(encode(frame), frame.sequence)
            count += isinstance(frame, Batch | Keyframe)
    finally:
        if writer is not None:
            writer.close()
    return count


def _as_text(report: Report) -> str:
    out = io.StringIO()
    render.table(report, Console(file=out, width=WIDTH, highlight=False))
    return out.getvalue()


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _versions() -> dict[str, str]:
    found = {"kvscope": version("kvscope"), "contract": f"{MAJOR}.{MINOR}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {
        "python": platform.python_version(), "system": platform.system(), "machine": platform.machine(),
    }  # fmt: skip
