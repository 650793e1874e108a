"""`monitor sql`: questions in SQL about what was kept."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table
from rich.text import Text

from kvscope.monitor.commands.shared_flags import Commands, add_window, window_of
from kvscope.monitor.configuration.value_types import positive
from kvscope.monitor.doctor.terminal import terminal_console
from kvscope.monitor.errors import BadTarget
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.text import escaped, escaped_json

if TYPE_CHECKING:
    from kvscope.monitor.history.findings_log import LoggedTransition
    from kvscope.monitor.history.sql_tables import SqlAnswer, SqlInput


def add(commands: Commands) -> None:
    """Put it on the command line."""
    parser = commands.add_parser(
        "sql",
        help="query the history with SQL",
        description="Runs a DuckDB SQL query over the history of a service (running or not), its archive, or a"
        " recording. docs/history.md describes the tables events, requests, findings and points.",
        epilog="exit codes: 0, 2 for an invalid query or a missing history",
    )
    parser.add_argument("query", metavar="QUERY", help="SQL, such as 'SELECT kind, count(*) FROM events GROUP BY kind'")
    parser.add_argument("recording", nargs="?", type=Path, metavar="RECORDING", help="a recording to query")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="query the history that `monitor serve --data DIR` keeps (KVSCOPE_DATA)",
    )
    parser.add_argument(
        "--archive",
        metavar="URL",
        help="also query the segments that `monitor serve --archive URL` copied, or those alone: s3://BUCKET/PREFIX,"
        " file:///DIR or a directory",
    )
    add_window(parser)
    parser.add_argument(
        "--timeout",
        type=positive,
        default=60.0,
        metavar="S",
        help="seconds after which to stop the query (default: 60)",
    )
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(default: table)")
    parser.set_defaults(run=_sql)


def _sql(parsed: argparse.Namespace) -> int:
    try:
        from kvscope.monitor.history.sql_tables import answer
    except ImportError as error:
        raise ValueError(
            f"`monitor sql` needs more than the base install: pip install 'kvscope[monitor]' ({error})"
        ) from error
    with answer(parsed.query, _input(parsed), parsed.timeout) as found:
        _PRINT[parsed.format](found)
    return 0


def _input(parsed: argparse.Namespace) -> SqlInput:
    """Return what is asked. Raises BadTarget."""
    from kvscope.monitor.history.archive_store import Archive
    from kvscope.monitor.history.sql_segments import TimeRange
    from kvscope.monitor.history.sql_tables import SqlInput

    window = TimeRange(*window_of(parsed).span(time.time_ns())) if parsed.since or parsed.until else TimeRange()
    data = parsed.data or os.environ.get("KVSCOPE_DATA")
    if parsed.recording is not None:
        if parsed.data is not None or parsed.archive is not None:
            raise BadTarget("give a RECORDING, or --data DIR and --archive URL, not both")
        directory = parsed.recording
        if not directory.is_dir():
            raise BadTarget(f"{directory} is not a recording: name a directory that `monitor record` wrote")
        if re.search(
            r"\b(points|findings)\b", parsed.query, re.IGNORECASE
        ):  # a recording has neither until it is judged
            points, transitions = _judged(directory)
            return SqlInput(directory, points, transitions, window=window)
        return SqlInput(directory, window=window)
    archive = Archive(parsed.archive) if parsed.archive is not None else None
    if data:
        directory = Path(data) / "history"
        if not directory.is_dir():
            raise BadTarget(f"{data} holds no history: `monitor serve --data {data}` keeps one there")
        return SqlInput(directory, archive=archive, window=window)
    if archive is None:
        raise BadTarget(
            "name a RECORDING, the directory that `monitor serve --data DIR` keeps its history in, or an --archive URL"
        )
    return SqlInput(None, archive=archive, window=window)


def _judged(directory: Path) -> tuple[dict[str, list[Point]], list[LoggedTransition]]:
    """Return the points of each engine in a recording, and the transitions of its findings."""
    from kvscope.monitor.history.findings_log import logged_transition
    from kvscope.monitor.pipeline import Pipeline

    watch = Pipeline()
    points: dict[str, list[Point]] = {}
    transitions: list[LoggedTransition] = []
    for frame in Recording(directory):
        watch.feed([frame])
        of_engine = points.setdefault(frame.engine, [])
        last = watch.fleet.engines[frame.engine].points
        if last and (not of_engine or last[-1].at_ns > of_engine[-1].at_ns):
            of_engine.append(last[-1])
        transitions += map(logged_transition, watch.take_transitions())
    return points, transitions


# -------------------------------------------------------------------- how it is printed


def _table(answer: SqlAnswer) -> None:
    table = Table()
    for column in answer.columns:
        table.add_column(Text(escaped(column)))
    for row in answer.rows:
        table.add_row(*(Text("" if value is None else _text(value)) for value in row))
    terminal_console(width=None if sys.stdout.isatty() else 1_000).print(table)


def _csv(answer: SqlAnswer) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(map(escaped, answer.columns))
    writer.writerows(["" if value is None else _text(value) for value in row] for row in answer.rows)


def _print_sql_json(answer: SqlAnswer) -> None:
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.rows]
    sys.stdout.write(escaped_json(msgspec.json.format(msgspec.json.encode(rows, enc_hook=str)).decode()) + "\n")


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(sep=" ")
    return escaped(msgspec.json.encode(value, enc_hook=str).decode() if isinstance(value, (list, dict)) else str(value))


_PRINT = {"table": _table, "csv": _csv, "json": _print_sql_json}
