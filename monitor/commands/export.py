"""`monitor export`: what an engine did, as a file for another tool."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

from monitor.commands.common import Commands, positive
from monitor.detectors.thresholds import Settings
from monitor.doctor.observe import WATCH_S, CannotTell
from monitor.events.wire import ContractError, Frame
from monitor.query import counted
from monitor.sources.live import LiveStream
from monitor.sources.recording import Recording
from monitor.sources.target import BadTarget, Kind, kind_of


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "export",
        help="what an engine did, as a file for another tool",
        description="Writes what a recording holds, or what a live stream says for a while, to a file that"
        " ui.perfetto.dev opens: requests with their states, the pool's balance, the queue, and findings.",
        epilog="exit codes: 0, 2 for a wrong command line, 3 for a stream that is not heard, or a recording of nothing",
    )
    parser.add_argument("target", metavar="TARGET", help="a recording (a directory or a segment), or tcp://, ipc://")
    parser.add_argument("file", type=Path, metavar="FILE", help="where to write it; what is there is replaced")
    parser.add_argument("--format", choices=("perfetto",), default="perfetto", help="(default: perfetto)")
    parser.add_argument("--timeout", type=positive, default=10.0, metavar="S", help="wait this long for a stream (10)")
    parser.add_argument(
        "--for", type=positive, default=WATCH_S, metavar="S", dest="watch_s",
        help=f"follow a stream for this long ({WATCH_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--set", action="append", default=[], metavar="CODE.NAME=VALUE", dest="thresholds",
        help="change a grace or a threshold, such as leak.finished-held.grace_s=30; may be repeated",
    )  # fmt: skip
    parser.set_defaults(run=_export)


def _export(parsed: argparse.Namespace) -> int:
    try:
        from monitor.outlets.perfetto.export import export
    except ImportError as error:
        raise ValueError(
            f"`monitor export` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    settings = Settings.parse(parsed.thresholds)
    unfinished = parsed.file.with_name(f"{parsed.file.name}.part")
    try:
        frames = _frames(parsed.target, parsed.timeout, parsed.watch_s)
        with unfinished.open("wb") as out:
            exported = export(frames, out, settings)
        if not exported.engine:
            raise CannotTell(f"{parsed.target} holds nothing that can be exported: there is no batch in it")
        unfinished.replace(parsed.file)
    except ContractError as error:
        raise CannotTell(str(error)) from error
    except OSError as error:
        raise ValueError(f"{parsed.file} cannot be written: {error.strerror}; name another file") from error
    finally:
        unfinished.unlink(missing_ok=True)
    print(
        f"{counted(exported.requests, 'request')}, {counted(exported.points, 'moment')} and"
        f" {counted(exported.findings, 'finding')} of {exported.engine} in {parsed.file}: open it at ui.perfetto.dev"
    )
    return 0


def _frames(target: str, timeout_s: float, watch_s: float) -> Iterator[Frame]:
    match kind_of(target):
        case Kind.RECORDING:
            return iter(Recording(Path(target)))
        case Kind.STREAM:
            return _live(target, timeout_s, watch_s)
        case _:
            raise BadTarget(
                f"{target} can be looked at, but not exported, as it does not tell every event: name an engine's event"
                " stream (tcp://127.0.0.1:5757) or a recording (`monitor record` makes one)"
            )


def _live(target: str, timeout_s: float, watch_s: float) -> Iterator[Frame]:
    """What the stream says for `watch_s` from its first word on. Raises CannotTell if there is none."""
    stream = LiveStream(target)
    started = time.monotonic()
    heard_at: float | None = None
    try:
        while heard_at is None or time.monotonic() - heard_at < watch_s:
            for received in stream.poll(0.1):
                heard_at = heard_at or time.monotonic()
                yield received.frame
            if heard_at is None and time.monotonic() - started > timeout_s:
                raise CannotTell(f"{target}: nothing was heard for {timeout_s:.0f} s. Is the engine running there?")
    finally:
        stream.close()
