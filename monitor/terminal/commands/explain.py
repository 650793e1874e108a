"""`monitor explain`: the life of a request, why a block is held, what an event was, what fell, where memory went."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

from rich.console import Console

from ...base.errors import CannotTell, NotKnown
from ...detectors.registry import parse_settings
from ...questions.observe import observe
from ...questions.query import Query
from ...questions.schema import BlockDetail, RequestDetail
from ...service.settings_table import positive
from .. import explain_text
from ..explain_text import EventReport, event_at, first_known
from ..memory_report import breakdown_in_log, breakdown_of_engines
from ..report import NOTHING
from ..terminal import terminal_console
from .shared_flags import Commands, a_time, add_shared, default_url, print_json, target_help

SHOWN: Final[dict[str, Callable[[Any, Console], None]]] = {
    "request": explain_text.request,
    "block": explain_text.block,
    "event": explain_text.event,
}


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    things = parser.add_subparsers(required=True, metavar="THING")
    for thing, name, described, help in (
        ("request", "ID", "show a request's state, cost and event history", "a request's id, or #NUMBER"),
        ("block", "ID", "show why a block is held, and its event history", "a block's number"),
        (
            "event",
            "POSITION",
            "show the event at a stream position, the events around it and the state after it",
            "epoch/sequence/event, from a finding's evidence (doctor --format json)",
        ),
    ):
        one = things.add_parser(
            thing,
            help=described,
            description=described,
            epilog=target_help(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.add_argument("id", metavar=name, help=help)
        one.add_argument("target", nargs="?", metavar="TARGET", help="where to read it from")
        one.add_argument("--engine", default="", help="the engine, if the target has several")
        one.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
        add_shared(one)
        one.set_defaults(run=_run, thing=thing)
    drop = things.add_parser(
        "drop",
        help="show why usage or throughput dropped",
        description="Shows why each block in a time window became free and what the window's steps did. Without"
        " --at, it picks the window with the largest drop in usage.",
        epilog=target_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drop.add_argument("target", nargs="?", metavar="TARGET", help="a recording, a stream or a service")
    drop.add_argument(
        "--at", type=a_time, metavar="TIME", help="time of the drop: 14:02:11 (UTC) or 2026-01-31T14:02:11Z"
    )
    drop.add_argument(
        "--window",
        type=positive,
        default=10.0,
        metavar="S",
        help="length of the window around --at, in seconds (default: 10)",
    )
    drop.add_argument("--engine", default="", help="the engine, if the target has several")
    drop.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    add_shared(drop)
    drop.set_defaults(run=_drop)
    _add_memory(things)


def _add_memory(things: Commands) -> None:
    memory = things.add_parser(
        "memory",
        help="break down a device's memory, including what is left for KV",
        description="Recomputes an engine's memory breakdown from its log (vLLM's or kvscope's), or shows the"
        " breakdown of a running kvscope engine beside the device's own figures.",
        epilog=(
            f"{target_help()}\nexit codes: 0, 2 for a wrong command line, 3 for no breakdown (the output names"
            " what is missing)"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    memory.add_argument("target", nargs="?", metavar="TARGET", help="where to read it from, without --log")
    memory.add_argument("--log", metavar="FILE", help="an engine's log, plain or gzip")
    memory.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")
    add_shared(memory)
    memory.set_defaults(run=_memory)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.thing == "block" and not parsed.id.isdecimal():
        raise ValueError(f"{parsed.id} is not a block number")
    with _asked(parsed, min(parsed.watch_s, 1.0)) as (query, engines):
        answers = _answers(query, engines, parsed.thing, parsed.id)
    if parsed.format == "json":
        print_json(answers)
    else:
        SHOWN[parsed.thing](answers, terminal_console())
    return NOTHING


@contextmanager
def _asked(parsed: argparse.Namespace, watch_s: float) -> Iterator[tuple[Query, list[str]]]:
    """Give the queries of the target, and the engines that are asked about. Raises NotKnown where there is none."""
    observation = observe(
        parsed.target or default_url(),
        parse_settings(parsed.thresholds),
        timeout_s=parsed.timeout,
        watch_s=watch_s,
        token=parsed.token,
    )
    with closing(observation):
        query = observation.query
        engines = [view.engine for view in query.engines() if parsed.engine in ("", view.engine)]
        if not engines:
            raise NotKnown(f"there is no engine {parsed.engine!r} at {observation.target}")
        yield query, engines


def _answers(query: Query, engines: Sequence[str], thing: str, name: str) -> RequestDetail | BlockDetail | EventReport:
    """Return its details from the first of the engines that has any."""
    if thing == "event":
        return event_at(query, engines, name)
    if thing == "request":
        return first_known(engines, lambda engine: query.request(engine, name))
    return first_known(engines, lambda engine: query.block(engine, int(name)))


def _drop(parsed: argparse.Namespace) -> int:
    with _asked(parsed, parsed.watch_s) as (query, engines):
        drops = [query.usage_drop(engine, parsed.at or "", parsed.window) for engine in engines]
    if parsed.format == "json":
        print_json(drops)
    else:
        for drop in drops:
            explain_text.drop(drop, terminal_console())
    return NOTHING


def _memory(parsed: argparse.Namespace) -> int:
    if parsed.log and parsed.target:
        raise ValueError("give a TARGET or --log FILE, not both")
    if parsed.log:
        report = breakdown_in_log(parsed.log)
    else:
        report = breakdown_of_engines(
            parsed.target or default_url(),
            parse_settings(parsed.thresholds),
            parsed.timeout,
            parsed.watch_s,
            parsed.token,
        )
    if parsed.format == "json":
        print_json(report)
    else:
        explain_text.memory(report, terminal_console())
    if report.missing:
        raise CannotTell(f"{report.source} has no complete memory breakdown: {'; '.join(report.missing)}")
    return NOTHING
