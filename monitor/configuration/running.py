"""Runs the service as a command line, its variables and its configuration file want it."""

from __future__ import annotations

import argparse

from kvscope.monitor.configuration.effective import settings_layers
from kvscope.monitor.configuration.service_config import loaded_config, refuse_what_cannot_run
from kvscope.monitor.service.reload import LoadedConfig
from kvscope.monitor.service.web_server import Mount, serve


def run_service(parsed: argparse.Namespace, mount: Mount | None = None) -> int:
    """Run until it is stopped, and return the exit code. Raises ValueError for what cannot be run.

    mount: puts the page on the app (None: no page).
    """
    layers = settings_layers(parsed)

    def load() -> LoadedConfig:
        effective = layers.read()
        refuse_what_cannot_run(effective)
        return loaded_config(effective)

    return serve(loaded_config(layers.read()), mount, load if layers.path is not None else None)
