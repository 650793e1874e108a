"""`monitor export`: what an engine did, as a file for another tool."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...base.errors import CannotTell
from ...base.text import counted, escaped
from ...contract.wire import ContractError
from ...detectors.registry import parse_settings
from ...questions.availability import need_of
from ..frame_reader import frames_of
from .shared_flags import add_for, add_thresholds, add_timeout, add_window, needs, window_of


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Writes a recording, or a part of a live stream, to a file for ui.perfetto.dev: requests with"
        " their states, the pool's balance, the queue, and findings."
    )
    parser.epilog = "exit codes: 0, 2 for a wrong command line, 3 for a stream that sends nothing or an empty recording"
    parser.add_argument("target", metavar="TARGET", help="a recording (a directory or a segment), or tcp://, ipc://")
    parser.add_argument("file", type=Path, metavar="FILE", help="the output file. An existing file is replaced")
    parser.add_argument("--format", choices=("perfetto",), default="perfetto", help="(default: perfetto)")
    add_window(parser)
    add_timeout(parser)
    add_for(parser)
    add_thresholds(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    with needs("export", "history"):
        from ...outputs.perfetto_trace import export
    settings = parse_settings(parsed.thresholds)
    unfinished = parsed.file.with_name(f"{parsed.file.name}.part")
    try:
        frames = frames_of(parsed.target, window_of(parsed), parsed.watch_s, parsed.timeout)
        with unfinished.open("wb") as out:
            exported = export(frames, out, settings)
        if not exported.engine:
            raise CannotTell(f"{parsed.target} contains no batch: {need_of('trace')}")
        unfinished.replace(parsed.file)
    except ContractError as error:
        raise CannotTell(str(error)) from error
    except OSError as error:
        raise ValueError(f"{parsed.file} cannot be written: {error.strerror}. Name another file") from error
    finally:
        unfinished.unlink(missing_ok=True)
    print(
        f"{counted(exported.requests, 'request')}, {counted(exported.points, 'moment')} and"
        f" {counted(exported.findings, 'finding')} of {escaped(exported.engine)} in {parsed.file}:"
        " open it at ui.perfetto.dev"
    )
    return 0
