"""`monitor bundle`: an anonymized support bundle."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...base.text import counted
from ...detectors.registry import parse_settings
from ..bundle_writer import make
from ..report import NOTHING
from .shared_flags import add_for, add_thresholds, add_timeout, add_window, window_of


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Writes a zip with a part of an engine's events, the findings in them, its configuration and"
        " versions. It contains no prompt, host name, model name, key or client request id. `monitor"
        " doctor FILE` reports the same findings from it."
    )
    parser.epilog = "exit codes: 0, 2 for a wrong command line or target, 3 for a stream that sends nothing"
    parser.add_argument("target", metavar="TARGET", help="a recording, or an engine's event stream")
    parser.add_argument("file", type=Path, metavar="FILE", help="a new file, such as bundle.zip")
    parser.add_argument("--keep-ids", action="store_true", help="keep the ids of requests")
    add_window(parser)
    add_timeout(parser)
    add_for(parser)
    add_thresholds(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    made = make(
        parsed.target,
        parsed.file,
        parse_settings(parsed.thresholds),
        window=window_of(parsed),
        watch_s=parsed.watch_s,
        timeout_s=parsed.timeout,
        keep_ids=parsed.keep_ids,
    )
    codes = ", ".join(dict.fromkeys(finding.code for finding in made.report.findings)) or "nothing"
    print(f"{parsed.file}: {counted(made.frames, 'batch', 'batches')}, {made.bytes:,} bytes; found in it: {codes}")
    return NOTHING
