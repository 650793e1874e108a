"""`monitor record`: a stream kept as a recording."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...base.text import escaped
from ...probes.publisher import EVENTS_ENDPOINT
from ...service.settings_table import positive
from ..report import NOTHING
from ..terminal import terminal_console


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Writes an engine's event stream to a directory until Ctrl-C. `monitor doctor` and `monitor explain` read it."
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help=f"an event stream, such as {EVENTS_ENDPOINT}, or any other live source",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new or empty directory")
    parser.add_argument("--seconds", type=positive, default=None, metavar="S", help="stop after this many seconds")
    parser.add_argument(
        "--timeout", type=positive, default=10.0, metavar="S", help="seconds to wait for the stream (default: 10)"
    )
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from ...history.recorder import record

    recorded = record(
        parsed.target,
        parsed.directory,
        seconds=parsed.seconds,
        timeout_s=parsed.timeout,
        console=terminal_console(stderr=True),
    )
    others = f", {recorded.others:,} samples and facts" if recorded.others else ""
    engine = escaped(recorded.engine)
    print(f"{recorded.batches:,} batches{others} of {engine} in {parsed.directory} ({recorded.bytes:,} bytes)")
    return NOTHING
