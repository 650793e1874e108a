"""`monitor runbook`: print the runbook of a finding code."""

from __future__ import annotations

import argparse
import difflib
import sys

from rich.markdown import Markdown

from ...detectors.registry import catalogue, runbook_of
from ..terminal import terminal_console


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Prints the runbook of a finding code: symptoms, causes, how to confirm it and what to do."
        " Without a code, lists all codes."
    )
    parser.epilog = "exit codes: 0 printed, 2 no such code"
    parser.add_argument("code", nargs="?", metavar="CODE", help="a finding code, such as leak.finished-held")
    parser.set_defaults(run=_print_runbook)


def _print_runbook(parsed: argparse.Namespace) -> int:
    if parsed.code is None:
        codes = sorted(catalogue())
        width = max(map(len, codes))
        for code in codes:
            print(f"{code:<{width}}  {catalogue()[code].title}")
        return 0
    text = runbook_of(parsed.code)
    if text is None:
        near = difflib.get_close_matches(parsed.code, catalogue(), cutoff=0.5)
        hint = f": did you mean {' or '.join(near)}?" if near else "; `monitor runbook` lists all codes"
        raise ValueError(f"there is no runbook for {parsed.code}{hint}")
    if sys.stdout.isatty():
        terminal_console().print(Markdown(text))
    else:
        sys.stdout.write(text)
    return 0
