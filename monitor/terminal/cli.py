"""`monitor`: the command line.

Each command has a module in commands/. Only the module of the command that runs is imported: the other commands appear
in the help with the line that COMMANDS has for them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Final, NoReturn

from kvscope.version import kvscope_version

COMMANDS: Final = {
    "doctor": ("doctor", "diagnose engines and recommend what to do"),
    "explain": ("explain", "explain a request, a block, an event, a usage drop or device memory"),
    "plan": ("plan", "compute the KV pool's size, its concurrency and the settings for it"),
    "record": ("record", "record an event stream"),
    "bundle": ("bundle", "write an anonymized support bundle"),
    "diff": ("diff", "compare two recordings, or two windows of one"),
    "export": ("export", "export a recording or stream for another tool"),
    "replay": ("replay", "publish a recording as a live stream"),
    "sql": ("sql", "query the history with SQL"),
    "top": ("top", "watch engines, requests and findings in a terminal"),
    "probe": ("probe_check", "check the probe that makes vLLM publish events"),
    "serve": ("serve", "run the service: web app, API, /metrics and alerts"),
    "agent": ("agent", "run the service without its web app, near the engines"),
    "hub": ("hub", "run the web app and the API over the engines of all agents"),
    "config": ("config_check", "check the configuration file of `monitor serve` and `monitor agent`"),
    "alerts": ("alerts", "list, test and silence the alerts of a running service"),
    "bus": ("bus", "set up and inspect the NATS JetStream streams of agents"),
    "plugins": ("plugins_list", "list the loaded plug-ins"),
    "runbook": ("runbook", "print the runbook of a finding code"),
}
"""Each command: its module in commands/ and its line in the help."""

INTERRUPTED_EXIT: Final = 130


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors name what was probably meant by a command, an option or a choice that does not exist."""

    def error(self, message: str) -> NoReturn:
        """End with the message on stderr, and exit code 2."""
        wrong = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (-[\w-]*)", message)
        near = get_close_matches(wrong[1] or wrong[2], set(self._words()), n=1) if wrong is not None else []
        super().error(f"{message}. Did you mean {near[0]}?" if near else message)

    def _words(self) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings
            yield from map(str, action.choices or ())
            for command in action.choices.values() if isinstance(action.choices, dict) else ():
                yield from command._words() if isinstance(command, CommandLine) else ()


def main(
    arguments: Sequence[str] | None = None, *, prog: str = "monitor", others: Mapping[str, str] | None = None
) -> int:
    """Run a command with these arguments (default: those of the process) and return its exit code.

    prog: the name it was called by. others: commands that the caller runs itself, with their lines in the help.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((text for text in given if not text.startswith("-")), "")
    parsed = parser(prog, only=(command,), others=others).parse_args(given)
    others_may_read = os.umask(0o077)  # what commands write holds names of hosts, models and requests
    try:
        code: int = parsed.run(parsed)
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has closed the pipe: it has enough
        return 0
    except Exception as error:
        code, message = _explained(error)
        if not message:
            raise
        from ..base.text import escaped

        for line in getattr(error, "lines", [message]):
            print(f"{prog}: {escaped(line)}", file=sys.stderr)
    finally:
        os.umask(others_may_read)
    return code


def parser(
    prog: str = "monitor", *, only: Iterable[str] = tuple(COMMANDS), others: Mapping[str, str] | None = None
) -> argparse.ArgumentParser:
    """Build the command line. Commands outside of `only` are listed, but have no arguments yet."""
    whole = CommandLine(prog=prog, description="Explains the KV memory of paged-attention LLM engines.")
    whole.add_argument("--version", action="version", version=f"kvscope {kvscope_version()}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, line) in COMMANDS.items():
        command = commands.add_parser(name, help=line)
        if name in only:
            importlib.import_module(f"kvscope.monitor.terminal.commands.{module}").define(command)
    for name, line in (others or {}).items():
        commands.add_parser(name, help=line)
    return whole


def _explained(error: Exception) -> tuple[int, str]:
    """Return the exit code and the message of an error that a command expects, or no message for any other."""
    # Imported only here, since they bring the detectors with them.
    from ..base.errors import BadTarget, CannotTell, NotKnown, Unreachable
    from ..contract.wire import ContractError
    from .report import CANNOT_TELL, USAGE

    if isinstance(error, PermissionError):
        return USAGE, f"{error.filename}: permission denied. Name another path, or run as its owner"
    # BadTarget and ValueError before the rest: some of those are ValueErrors, too.
    if isinstance(error, BadTarget | ValueError):
        return USAGE, str(error)
    if isinstance(error, CannotTell | Unreachable | NotKnown | ContractError):
        return CANNOT_TELL, str(error)
    return USAGE, ""
