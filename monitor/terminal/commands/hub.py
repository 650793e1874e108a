"""`monitor hub`: the page and the API over all engines of a tenant, from what agents publish to NATS."""

from __future__ import annotations

import argparse

from ...service.allocators import use_few_allocators
from ...service.settings_table import add_flags
from .shared_flags import needs


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Follows what `monitor agent --nats` publishes, and serves page, API and /metrics over all engines"
        " of a tenant on one port. Questions about one engine go to the agent that has it. A hub keeps nothing, and any"
        " number of them may run."
    )
    add_flags(parser, "hub")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    use_few_allocators()
    with needs("hub", "serve,fleet"):
        from kvscope.dashboards.web.app import mount

        from ...service.hub_server import hub_config, serve_hub
        from ...service.settings_file import settings_layers
    return serve_hub(hub_config(settings_layers(parsed).read()), mount)
