"""`monitor serve`: page, API, /metrics and alerts, on one port."""

from __future__ import annotations

import argparse

from kvscope.monitor.commands.shared_flags import Commands
from kvscope.monitor.configuration.settings_table import add_flags


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "serve",
        help="run the service: web app, API, /metrics and alerts",
        description="Reads engines' event streams, metrics and logs, and serves the web app, the API and /metrics"
        " on one port.",
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
