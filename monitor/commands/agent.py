"""`monitor agent`: `monitor serve` without the page, for the engines of a node or a pod."""

from __future__ import annotations

import argparse

from kvscope.monitor.commands.shared_flags import Commands
from kvscope.monitor.configuration.settings_table import add_flags


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "agent",
        help="run the service without its web app, near the engines",
        description="Reads the engines of a node or pod, diagnoses them, keeps their history on local disk, and"
        " serves the API and /metrics. It is `monitor serve` without the web app.",
    )
    add_flags(parser, "agent")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.configuration.running import run_service
    except ImportError as error:
        raise ValueError(
            f"`monitor agent` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    return run_service(parsed)
