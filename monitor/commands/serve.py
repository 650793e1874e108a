"""`monitor serve`: page, API, /metrics and alerts, on one port."""

from __future__ import annotations

import argparse

from kvscope.monitor.commands.shared_flags import Commands
from kvscope.monitor.configuration.settings_table import add_flags


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "serve",
        help="the service: page, API, /metrics, alerts",
        description="Reads engines' event streams and metrics pages, and serves what they say: web page, API and"
        " /metrics on one port.",
    )
    add_flags(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.configuration.running import run_service
    except ImportError as error:
        raise ValueError(
            f"`monitor serve` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    from kvscope.dashboards.web.app import mount

    return run_service(parsed, mount)
