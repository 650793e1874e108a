"""The `kvscope` command: `kvscope engine …` runs the engine, anything else is a `monitor` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

ENGINE_LINE = "serve a model with the paged-attention engine, or bench it"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvscope` with these arguments (default: those of the process) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["engine"]:
        return _engine(given[1:])
    from kvscope.monitor.terminal.cli import main as monitor

    return monitor(given, prog="kvscope", others={"engine": ENGINE_LINE})


def _engine(given: Sequence[str]) -> int:
    try:
        from kvscope.engine.command_line import main as engine
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("kvscope"):
            raise
        from kvscope.monitor.base.text import install_hint

        print(f"kvscope: the engine needs {error.name}: {install_hint('engine')}", file=sys.stderr)
        return 2
    return engine(given)
