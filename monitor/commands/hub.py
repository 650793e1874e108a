"""`monitor hub`: the page and the API over all engines of a tenant, from what agents publish to NATS."""

from __future__ import annotations

import argparse

from kvscope.monitor.commands.shared_flags import Commands
from kvscope.monitor.configuration.settings_table import add_flags


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "hub",
        help="run the web app and the API over the engines of all agents",
        description="Follows what `monitor agent --nats` publishes, and serves page, API and /metrics over all engines"
        " of a tenant on one port. Questions about one engine go to the agent that has it. A hub keeps nothing, and any"
        " number of them may run.",
    )
    add_flags(parser, "hub")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.dashboards.web.app import mount
        from kvscope.monitor.configuration.effective import settings_layers
        from kvscope.monitor.configuration.hub_settings import hub_config
        from kvscope.monitor.hub.hub_server import serve_hub
    except ImportError as error:
        raise ValueError(
            f"`monitor hub` needs more than the base install: pip install 'kvscope[monitor,fleet]' ({error})"
        ) from error
    return serve_hub(hub_config(settings_layers(parsed).read()), mount)
