"""`monitor agent`: `monitor serve` without the page, for the engines of a node or a pod."""

from __future__ import annotations

import argparse

from ...service.allocators import use_few_allocators
from ...service.settings_table import add_flags
from .shared_flags import needs


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Reads the engines of a node or pod, diagnoses them, keeps their history on local disk, and"
        " serves the API and /metrics. It is `monitor serve` without the web app."
    )
    add_flags(parser, "agent")
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    use_few_allocators()
    with needs("agent", "serve"):
        from ...service.service_config import run_service
    return run_service(parsed)
