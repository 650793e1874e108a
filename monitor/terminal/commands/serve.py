"""`monitor serve`: page, API, /metrics and alerts, on one port."""

from __future__ import annotations

import argparse

from ...service.allocators import use_few_allocators
from ...service.settings_table import add_flags
from .shared_flags import needs


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Reads engines' event streams, metrics and logs, and serves the web app, the API and /metrics on one port."
    )
    add_flags(parser)
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    use_few_allocators()
    with needs("serve", "serve"):
        from kvscope.dashboards.web.app import mount

        from ...service.service_config import run_service

    return run_service(parsed, mount)
