"""`monitor`: the command line.

monitor doctor [TARGET…]        what is wrong, and what to do
monitor explain request ID      the life of a request
monitor explain block ID        why a block is held, and its life
monitor explain event POSITION  what an event was, around it, and how things stood after it
monitor explain drop            what made usage fall or throughput vanish
monitor explain memory          what a device's memory went to, and what that leaves for KV
monitor top [TARGET]            engines, requests and findings at a terminal
monitor record TARGET DIR       keep a stream as a recording
monitor bundle TARGET FILE      a support bundle that names nobody
monitor diff BEFORE AFTER       what got better and what got worse
monitor export TARGET FILE      a recording or a stream, as a trace for Perfetto
monitor replay RECORDING        a recording as a live stream again
monitor sql QUERY               questions in SQL about what was kept
monitor probe check             whether a vLLM has what the probe hooks into
monitor incidents               every fault brought about in virtual time, and what is found of it
monitor serve                   the service: page, API, /metrics, alerts
monitor alerts test             whether alerts arrive; also list, silence, unsilence, replay
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from kvscope.monitor.commands import (
    alerts,
    bundle,
    diff,
    doctor,
    explain,
    export,
    incidents,
    probe_check,
    record,
    replay,
    serve,
    sql,
    top,
)
from kvscope.monitor.doctor.observe import CannotTell
from kvscope.monitor.doctor.report import CANNOT_TELL, NOTHING, USAGE
from kvscope.monitor.errors import NotKnown, Unreachable
from kvscope.monitor.events.wire import ContractError
from kvscope.monitor.sources.targets import BadTarget


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `monitor` with these arguments (those of the process if None); its exit code."""
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except (BadTarget, ValueError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return USAGE
    except PermissionError as error:
        print(f"monitor: {error.filename}: permission denied; name another path, or run as its owner", file=sys.stderr)
        return USAGE
    except (CannotTell, Unreachable, NotKnown, ContractError) as error:
        print(f"monitor: {error}", file=sys.stderr)
        return CANNOT_TELL
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has seen enough
        return NOTHING
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line; the reference is made from it."""
    parser = argparse.ArgumentParser(
        prog="monitor", description="Explains the KV memory of paged-attention LLM engines."
    )
    parser.add_argument("--version", action="version", version=f"kvscope {version('kvscope')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    doctor.add(commands)
    explain.add(commands)
    record.add(commands)
    bundle.add(commands)
    diff.add(commands)
    export.add(commands)
    replay.add(commands)
    sql.add(commands)
    top.add(commands)
    probe_check.add(commands)
    incidents.add(commands)
    serve.add(commands)
    alerts.add(commands)
    return parser
