"""The `kvscope` command: `kvscope engine …` runs the engine, anything else is a `monitor` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvscope` with these arguments (default: the process's own) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["engine"]:
        from kvscope.engine.command_line import main as engine

        return engine(given[1:])
    from kvscope.monitor.cli import main as monitor

    return monitor(given)
