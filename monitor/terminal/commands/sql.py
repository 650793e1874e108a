"""`monitor sql`: questions in SQL about what was kept."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec
from rich.table import Table
from rich.text import Text

from ...base import limits
from ...base.errors import BadTarget
from ...base.text import escaped, escaped_json
from ...history.sql_query import QUERY_TIMEOUT_S, SqlBounds, SqlRequest, SqlRows, SqlSource, TimeRange, ask_process
from ...ledger.engine_ledger import Point
from ...service.settings_table import positive, size
from ...sources.recording import Recording
from ..terminal import terminal_console
from .shared_flags import add_window, needs, window_of

NEEDED: Final = ("duckdb", "pyarrow", "fsspec")


def define(parser: argparse.ArgumentParser) -> None:
    """Define the arguments."""
    parser.description = (
        "Runs a DuckDB SQL query over the history of a service (running or not), its archive, or a"
        " recording. docs/history.md describes the tables events, requests, findings and points."
    )
    parser.epilog = "exit codes: 0, 2 for an invalid query or a missing history"
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
        default=QUERY_TIMEOUT_S,
        metavar="S",
        help="seconds after which to stop the query (default: 60)",
    )
    parser.add_argument(
        "--max-bytes",
        type=size,
        default=limits.SQL_ANSWER_BYTES,
        metavar="SIZE",
        help="refuse an answer with more bytes of rows (default: 32M)",
    )
    parser.add_argument("--format", choices=("table", "csv", "json"), default="table", help="(default: table)")
    parser.set_defaults(run=_sql)


def _sql(parsed: argparse.Namespace) -> int:
    with needs("sql", "history"):
        for name in NEEDED:  # looked for only: the process that runs the query loads them
            if importlib.util.find_spec(name) is None:
                raise ImportError(f"no {name}")
    bounds = SqlBounds(parsed.timeout, answer_bytes=parsed.max_bytes)
    with TemporaryDirectory(prefix="kvscope-sql-") as judged:
        source = _source(parsed, Path(judged))
        request = SqlRequest(parsed.query, "objects" if parsed.format == "json" else "texts", source, bounds)
        answer = msgspec.json.decode(ask_process(request), type=SqlRows)
    for each in answer.left_out:
        print(f"monitor sql: {escaped(each)}", file=sys.stderr)
    _PRINT[parsed.format](answer)
    return 0


def _source(parsed: argparse.Namespace, judged: Path) -> SqlSource:
    """Return what is asked. `judged` takes what a recording has once it is judged. Raises BadTarget."""
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
            _judge(directory, judged)
            return SqlSource(directory, window=window, judged=judged)
        return SqlSource(directory, window=window)
    if data:
        directory = Path(data) / "history"
        if not directory.is_dir():
            raise BadTarget(f"{data} holds no history: `monitor serve --data {data}` keeps one there")
        return SqlSource(directory, parsed.archive or "", window)
    if parsed.archive is None:
        raise BadTarget(
            "name a RECORDING, the directory that `monitor serve --data DIR` keeps its history in, or an --archive URL"
        )
    return SqlSource(None, parsed.archive, window)


def _judge(directory: Path, into: Path) -> None:
    """Write the points of each engine in a recording, and the log of its findings."""
    from ...history.findings_log import FindingsLog
    from ...history.sealed_segment import points_table, write_table
    from ...questions.pipeline import Pipeline

    watch = Pipeline()
    points: dict[str, list[Point]] = {}
    log = FindingsLog(into)
    for frame in Recording(directory):
        watch.feed([frame])
        of_engine = points.setdefault(frame.engine, [])
        last = watch.fleet.engines[frame.engine].points
        if last and (not of_engine or last[-1].at_ns > of_engine[-1].at_ns):
            of_engine.append(last[-1])
        log.append(watch.take_transitions())
    for number, (engine, of_engine) in enumerate(points.items()):
        (into / str(number)).mkdir()
        write_table(points_table(engine, 0, of_engine), into / str(number) / "points.parquet")


# -------------------------------------------------------------------- how it is printed


def _table(answer: SqlRows) -> None:
    table = Table()
    for column in answer.columns:
        table.add_column(Text(escaped(column)))
    for row in _texts(answer):
        table.add_row(*map(Text, row))
    terminal_console(width=None if sys.stdout.isatty() else 1_000).print(table)


def _csv(answer: SqlRows) -> None:
    writer = csv.writer(sys.stdout)
    writer.writerow(map(escaped, answer.columns))
    writer.writerows(_texts(answer))


def _print_sql_json(answer: SqlRows) -> None:
    sys.stdout.write(escaped_json(msgspec.json.format(bytes(answer.rows)).decode()) + "\n")


def _texts(answer: SqlRows) -> Sequence[Sequence[str]]:
    rows = msgspec.json.decode(answer.rows, type=list[list[str | None]])
    return [["" if text is None else escaped(text) for text in row] for row in rows]


_PRINT = {"table": _table, "csv": _csv, "json": _print_sql_json}
