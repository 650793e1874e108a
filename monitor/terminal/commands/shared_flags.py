"""Flags that several commands share, and how they print JSON."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import msgspec

from ...base.text import escaped_json, install_hint, moment
from ...questions.observe import WATCH_S, Window, when
from ...service.settings_table import positive
from ...sources.source_registry import source_help

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The parser to which a command adds itself."""
DEFAULT_URL: Final = "http://127.0.0.1:8765"
_FORM_WIDTH: Final = 30


def checked(read: Callable[[str, int], object]) -> Callable[[str], str]:
    """Return the type of an argument that `read` must take. It stays as written: what 14:02:11 means depends on the
    target.
    """

    def check(text: str) -> str:
        try:
            read(text, 0)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return check


a_time: Final = checked(moment)
a_time_or_length: Final = checked(when)


@contextmanager
def needs(command: str, extra: str) -> Iterator[None]:
    """Import what an extra brings. Raises ValueError, with the command that installs it, if it is missing."""
    try:
        yield
    except ImportError as error:
        hint = install_hint(extra)
        raise ValueError(f"`monitor {command}` needs more than the base install: {hint} ({error})") from error


def target_help() -> str:
    """Return what a target may be, one form on a line, built-in sources and those of plug-ins."""
    lines = ["a target is one of"]
    for form, description in source_help():
        first, *others = textwrap.wrap(description, 79 - _FORM_WIDTH - 2)
        lines.append(f"  {form:<{_FORM_WIDTH}}{first}")
        lines += [" " * (_FORM_WIDTH + 2) + other for other in others]
    return "\n".join(lines) + "\n"


def add_shared(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that reads targets."""
    add_token(parser)
    add_timeout(parser)
    add_for(parser)
    add_thresholds(parser)


def add_token(parser: argparse.ArgumentParser) -> None:
    """For a service."""
    parser.add_argument(
        "--token", default=os.environ.get("KVSCOPE_TOKEN", ""), help="the service's token (default: KVSCOPE_TOKEN)"
    )


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """For what may not answer."""
    parser.add_argument(
        "--timeout",
        type=positive,
        default=10.0,
        metavar="S",
        help="seconds to wait for a target to answer (default: 10)",
    )


def add_for(parser: argparse.ArgumentParser) -> None:
    """For what goes on."""
    parser.add_argument(
        "--for",
        type=positive,
        default=WATCH_S,
        metavar="S",
        dest="watch_s",
        help=f"seconds to watch a live target (default: {WATCH_S:g})",
    )


def add_thresholds(parser: argparse.ArgumentParser) -> None:
    """For whatever judges."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="CODE.NAME=VALUE",
        dest="thresholds",
        help="change a pending period or threshold, such as leak.finished-held.grace_s=30 (repeatable)",
    )


def add_window(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every command that reads a part of the past."""
    parser.add_argument(
        "--since",
        type=a_time_or_length,
        metavar="WHEN",
        help="start of the window to inspect: a time (14:02:11, in UTC, or 2026-01-31T14:02:11Z), or a length before"
        " now, or before the end of a recording or log (30m, 2h)",
    )
    parser.add_argument("--until", type=a_time_or_length, metavar="WHEN", help="end of the window, in the same forms")


def window_of(parsed: argparse.Namespace) -> Window:
    """Return the window of the flags of `add_window`."""
    return Window(parsed.since or "", parsed.until or "")


def default_url() -> str:
    """Return the service to query when no target is given."""
    return os.environ.get("KVSCOPE_URL", DEFAULT_URL)


def print_json(answer: Any) -> None:
    """Print an answer as indented JSON."""
    sys.stdout.write(escaped_json(msgspec.json.format(msgspec.json.encode(answer)).decode()) + "\n")
