"""`monitor probe check`: whether a vLLM has what the probe hooks into."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from ...base.errors import CannotTell
from ...base.text import install_hint


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    things = parser.add_subparsers(required=True, metavar="THING")
    check = things.add_parser(
        "check",
        help="check whether a vLLM has the methods that the probe hooks",
        description="Checks, without starting anything, whether a vLLM has the methods that the probe wraps and"
        " whether it would load the probe.",
        epilog="exit codes: 0 it works, 1 something is missing, 3 no vLLM found",
    )
    check.add_argument(
        "--python",
        default=sys.executable,
        metavar="PYTHON",
        help="the Python with vLLM and kvscope (default: this one)",
    )
    check.set_defaults(run=_check)


def _check(parsed: argparse.Namespace) -> int:
    command = [parsed.python, "-m", "kvscope.monitor.probes.vllm.compatibility"]
    quiet = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    except OSError as error:
        raise ValueError(f"--python {parsed.python} cannot be run: {error.strerror}") from error
    if not done.stdout:
        last = done.stderr.strip().splitlines()[-1:]
        raise CannotTell(
            f"{parsed.python} could not look: {' '.join(last)}. kvscope must be installed beside vLLM:"
            f" {parsed.python} -m {install_hint()}"
        )
    sys.stdout.write(done.stdout)
    return done.returncode
