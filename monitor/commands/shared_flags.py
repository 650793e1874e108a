"""Flags that several commands share, and how they print JSON."""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from typing import Any, Final, TypeAlias

import msgspec

from kvscope.monitor.configuration.value_types import positive
from kvscope.monitor.doctor.observe import WATCH_S
from kvscope.monitor.doctor.time_window import Window, when
from kvscope.monitor.json_names import encode_answer
from kvscope.monitor.sources.source_registry import source_help
from kvscope.monitor.text import escaped_json, moment

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The parser to which a command adds itself."""
DEFAULT_URL: Final = "http://127.0.0.1:8765"
_FORM_WIDTH: Final = 30


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
        type=_when,
        metavar="WHEN",
        help="start of the window to inspect: a time (14:02:11, in UTC, or 2026-01-31T14:02:11Z), or a length before"
        " now, or before the end of a recording or log (30m, 2h)",
    )
    parser.add_argument("--until", type=_when, metavar="WHEN", help="end of the window, in the same forms")


def window_of(parsed: argparse.Namespace) -> Window:
    """Return the window of the flags of `add_window`."""
    return Window(parsed.since or "", parsed.until or "")


def _when(text: str) -> str:
    try:
        when(text, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def a_time(text: str) -> str:
    """Return a time as written: what 14:02:11 means depends on the target."""
    try:
        moment(text, 0)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def default_url() -> str:
    """Return the service to query when no target is given."""
    return os.environ.get("KVSCOPE_URL", DEFAULT_URL)


def print_json(answer: Any) -> None:
    """Print an answer as indented JSON."""
    sys.stdout.write(escaped_json(msgspec.json.format(encode_answer(answer)).decode()) + "\n")
