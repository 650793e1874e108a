"""`monitor top`: engines, requests and findings at a terminal, while they go on."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from kvscope.monitor.commands.shared_flags import Commands, add_thresholds, add_timeout, add_token, default_url
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.doctor.report import NOTHING
from kvscope.monitor.doctor.watch_mode import open_live


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "top",
        help="watch engines, requests and findings in a terminal",
        description="Shows engines live: who holds their pools, their requests and their findings. Keys: e next"
        " engine, s sort by blocks or by time in state, arrows and Enter show a request's history, q"
        " quit.",
        epilog="exit codes: 0, 2 for a wrong command line or target, 3 for a target that does not answer",
    )
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
    try:
        from kvscope.monitor.doctor.top_screen import Looker, Top
    except ImportError as error:
        raise ValueError(
            f"`monitor top` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
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
