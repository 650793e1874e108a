"""`monitor plugins`: what other distributions add to kvscope, and what of it failed."""

from __future__ import annotations

import argparse
import sys

from rich.table import Table

from ...base import plugins
from ..terminal import terminal_console
from .shared_flags import print_json


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Lists the detectors, sources and receivers that other installed distributions add as entry"
        " points, with their versions and errors."
    )
    parser.epilog = "exit codes: 0 all loaded, or there are none, 1 at least one failed"
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    parser.set_defaults(run=_list_plugins)


def _list_plugins(parsed: argparse.Namespace) -> int:
    from ...detectors.registry import catalogue
    from ...sources.source_registry import source_plugins

    catalogue()
    source_plugins()
    plugins.load(plugins.RECEIVER_GROUP)
    found = plugins.loaded()
    if parsed.format == "json":
        print_json(found)
    elif not found:
        print("no plug-ins are installed. docs/write-a-source.md and docs/write-a-detector.md show how to write one")
    else:
        table = Table("group", "name", "distribution", "version", "status", "error", box=None)
        for one in found:
            table.add_row(one.group, one.name, one.distribution, one.version, one.status, one.error)
        terminal_console(width=None if sys.stdout.isatty() else 200).print(table)
    return int(any(one.status == "failed" for one in found))
