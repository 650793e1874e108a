"""Makes a support bundle: an engine's events and findings, in a form that is safe to share."""

from __future__ import annotations

import io
import os
import platform
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from kvscope.version import kvscope_version

from ..base.errors import CannotTell
from ..contract.journal import JournalWriter
from ..contract.wire import MAJOR, MINOR, Batch, ContractError, Frame, Keyframe, encode
from ..detectors.detector import Settings
from ..questions.observe import ALWAYS, Window
from ..sources.support_bundle import EVENTS_FOLDER
from . import report_table
from .frame_reader import frames_of
from .redaction import Redactor
from .report import Report, examine
from .terminal import WIDTH, terminal_console

README: Final = """\
A support bundle of kvscope. `monitor doctor FILE` and `monitor explain` read it.

events/             what the engine did, as a journal (docs/contract.md)
report.txt          what `monitor doctor` found in it, and report.json for programs
configuration.json  what each engine reported about itself
versions.json       of what made this bundle

Removed: {out}. A name became the same word
wherever it stood, by a hash whose key was not kept. Prompts and tokens are never in an engine's events.
"""
PACKAGES: Final = ("msgspec", "pyzmq", "httpcore2", "rich")


class Made(NamedTuple):
    """The contents of a bundle."""

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
    """Write the bundle of a recording, or of a part of it, or of a stream watched for `watch_s`, to `file`.

    Raises BadTarget for a target without events, CannotTell, and ValueError if the file exists or cannot be written.
    """
    if file.exists():
        raise ValueError(f"{file} exists already: name a new file")
    redactor = Redactor(os.urandom(16), keep_ids)
    with tempfile.TemporaryDirectory(prefix="kvscope-bundle-") as folder:
        directory = Path(folder)
        try:
            frames = _keep(
                (redactor.frame(frame) for frame in frames_of(target, window, watch_s, timeout_s)), directory
            )
        except ContractError as error:
            raise CannotTell(str(error)) from error
        if not frames:
            raise CannotTell(f"{target} has no events in that window")
        report = examine([folder], settings)
        shown = msgspec.json.decode(msgspec.json.encode(report).replace(folder.encode(), b"the bundle"), type=Report)
        out = "host and model names, callers' traces, words of no public vocabulary" + (
            "" if keep_ids else ", requests' ids"
        )
        texts = {
            "README.txt": README.format(out=out),
            "report.txt": _as_text(shown),
            "report.json": _bundle_json(shown),
            "configuration.json": _bundle_json({each.engine: each.configuration for each in shown.balances}),
            "versions.json": _bundle_json(_versions()),
        }
        try:
            with zipfile.ZipFile(file, "x", zipfile.ZIP_DEFLATED) as bundle:
                for name, text in texts.items():
                    bundle.writestr(name, text)
                for segment in sorted(directory.iterdir()):
                    bundle.write(segment, EVENTS_FOLDER + segment.name)
        except OSError as error:
            raise ValueError(f"{file} cannot be written: {error.strerror}. Name another file") from error
    return Made(frames, file.stat().st_size, shown)


def _keep(frames: Iterable[Frame], directory: Path) -> int:
    """Return how many, with each epoch of an engine in a segment of its own."""
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
    report_table.report_table(report, terminal_console(file=out, width=WIDTH))
    return out.getvalue()


def _bundle_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _versions() -> dict[str, str]:
    found = {"kvscope": kvscope_version(), "contract": f"{MAJOR}.{MINOR}"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
    }
