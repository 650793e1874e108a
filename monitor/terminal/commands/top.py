"""`monitor top`: engines, requests and findings at a terminal, while they go on."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from ...detectors.registry import parse_settings
from ..report import NOTHING
from ..watch_mode import open_live
from .shared_flags import add_thresholds, add_timeout, add_token, default_url, needs


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Shows engines live: who holds their pools, their requests and their findings. Keys: e next"
        " engine, s sort by blocks or by time in state, arrows and Enter show a request's history, q"
        " quit."
    )
    parser.epilog = "exit codes: 0, 2 for a wrong command line or target, 3 for a target that does not answer"
    parser.add_argument(
        "target",
        nargs="?",
        metavar="TARGET",
        help="a service, or any live source",
    )
    add_token(parser)
    add_timeout(parser)
    add_thresholds(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    with needs("top", "serve"):
        from ..top_screen import Looker, Top
    if not sys.stdout.isatty():
        raise ValueError("`monitor top` needs a terminal: use `monitor doctor --watch` to print lines")
    settings = parse_settings(parsed.thresholds)
    with closing(open_live(parsed.target or default_url(), settings, parsed.timeout, parsed.token)) as live:
        looker = Looker(live)
        looker.start()
        try:
            Top(looker).run()
        finally:
            looker.stop()
    return NOTHING
