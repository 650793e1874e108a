"""SQL over what was kept, closed segments and open ones alike: the tables `events`, `requests`, `findings`, `points`.

A query reads Parquet only: open segments are turned into it in a folder of their own that goes again. It runs in
memory, may read the files of the history and of its archive and no others, and cannot write.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa

from kvscope.monitor.events.kinds import Status
from kvscope.monitor.history.archive_files import PROTOCOL, ArchiveFiles
from kvscope.monitor.history.archive_store import Archive
from kvscope.monitor.history.findings_log import FindingsLog, LoggedTransition
from kvscope.monitor.history.sealed_segment import points_table, write_table
from kvscope.monitor.history.sql_segments import (
    BadQuery,
    SqlSegment,
    TimeRange,
    hidden_points,
    local_segments,
    overlapping,
    with_archived,
)
from kvscope.monitor.ledger.engine_ledger import Point

THREADS: Final = 2
MEMORY: Final = "2GB"
QUERY_TIMEOUT_S: Final = 60.0
"""How long a query may take, unless a timeout is given."""
INTERRUPT_EVERY_S: Final = 0.05

logger = logging.getLogger(__name__)


class SqlAnswer(NamedTuple):
    """The columns' names, and the rows as they come."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


class SqlInput(NamedTuple):
    """The input of a query: a history or a recording in `directory`, segments that only `archive` has, or both.

    For a recording, which keeps neither, callers can pass `points` by engine and the `transitions` of findings.
    """

    directory: Path | None
    points: Mapping[str, Sequence[Point]] = {}
    transitions: Sequence[LoggedTransition] = ()
    archive: Archive | None = None
    window: TimeRange = TimeRange()


@contextmanager
def answer(query: str, of: SqlInput, timeout_s: float = QUERY_TIMEOUT_S) -> Iterator[SqlAnswer]:
    """Run `query`. Finding its segments, the query and reading its rows may take `timeout_s` together.

    Raises BadQuery.
    """
    _check_sql(query)
    until_s = time.monotonic() + timeout_s
    with TemporaryDirectory(prefix="kvscope-sql-") as scratch, duckdb.connect(":memory:") as connection:
        segments, files = _segments(of, Path(scratch), timeout_s)
        if files is not None:
            connection.register_filesystem(files)
        ended = threading.Event()
        timer = threading.Thread(target=_interrupt, args=(connection, until_s, ended), daemon=True)
        timer.start()
        try:
            _limit_resources(connection, scratch)
            _make_views(connection, query, segments, of)
            _lock_down(connection, of.directory, scratch)
            cursor = connection.execute(query)
            yield SqlAnswer([column[0] for column in cursor.description or ()], _rows(cursor))
        except duckdb.Error as error:
            if isinstance(error, duckdb.InterruptException) or time.monotonic() >= until_s:
                raise BadQuery(
                    f"the query was stopped after {timeout_s:g} s: ask for less, or give --timeout"
                ) from error
            if files is not None and files.error:
                raise BadQuery(f"the archive cannot be read: {files.error}") from error
            raise BadQuery(_plain_error(error)) from error
        finally:
            ended.set()
            timer.join()


def _interrupt(connection: duckdb.DuckDBPyConnection, until_s: float, ended: threading.Event) -> None:
    """Stop what runs at that time, and what begins later: an interrupt between two statements stops neither."""
    wait_s = until_s - time.monotonic()
    while not ended.wait(max(0.0, wait_s)):
        connection.interrupt()
        wait_s = INTERRUPT_EVERY_S


def _segments(of: SqlInput, scratch: Path, timeout_s: float) -> tuple[list[SqlSegment], ArchiveFiles | None]:
    local = list(local_segments(of.directory, scratch, of.window)) if of.directory is not None else []
    files: ArchiveFiles | None = None
    if of.archive is not None:
        segments, files = with_archived(local, of.archive, of.window, timeout_s)
    else:
        segments = [SqlSegment(str(segment.path), engine, segment.epoch) for engine, segment in local]
    for number, (engine, of_engine) in enumerate(of.points.items()):
        folder = scratch / f"points-{number}"
        folder.mkdir()
        write_table(points_table(engine, 0, of_engine), folder / "points.parquet")
        segments.append(SqlSegment(str(folder), engine, 0))
    return segments, files


def _limit_resources(connection: duckdb.DuckDBPyConnection, scratch: str) -> None:
    for setting in (
        "TimeZone = 'UTC'",
        f"threads = {THREADS}",
        f"memory_limit = {_quoted(MEMORY)}",
        f"temp_directory = {_quoted(scratch)}",
    ):
        connection.execute(f"SET {setting}")


def _lock_down(connection: duckdb.DuckDBPyConnection, directory: Path | None, scratch: str) -> None:
    """Let the query read the files of its segments and no others."""
    folders = [*([os.fspath(directory.resolve())] if directory is not None else []), scratch, f"{PROTOCOL}://"]
    for setting in (
        f"allowed_directories = [{', '.join(map(_quoted, folders))}]",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _check_sql(query: str) -> None:
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise BadQuery(_plain_error(error)) from error
    reads = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in reads:
        raise BadQuery("one query that reads, please: SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, SHOW TABLES or EXPLAIN")


def _plain_error(error: duckdb.Error) -> str:
    return f"the query cannot be run: {error}"


def _rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while some := cursor.fetchmany(10_000):
        yield from some


def _log_of(directory: Path) -> list[LoggedTransition]:
    return FindingsLog(directory).read()


# -------------------------------------------------------------------- the tables

_EVENTS: Final = """
CREATE VIEW events AS
SELECT
    engine, epoch, sequence, event, make_timestamp(at_ns // 1000) AS time, at_ns,
    kind, kv_group, request, args, hashes, ids
FROM {files} WHERE at_ns BETWEEN {since} AND {until}
"""

_TABLE_NAMES: Final = """
CREATE VIEW names AS
SELECT engine, epoch, request, any_value(id) AS id
FROM (
    SELECT engine, epoch, unnest(map_keys(texts)) AS request, unnest(map_values(texts)) AS id
    FROM {files} WHERE cardinality(texts) > 0
)
WHERE request >= 0
GROUP BY ALL
"""

_REQUESTS: Final = f"""
CREATE VIEW requests AS
SELECT
    engine, epoch, request, id, arrived, admitted, first_token, finished,
    {[status.name for status in Status]}[status + 1] AS status,
    prompt_tokens, max_tokens, hit_tokens, preemptions, tokens_lost, blocks_allocated, blocks_reused
FROM (
    SELECT
        engine, epoch, request,
        min(time) FILTER (kind = 'ARRIVED') AS arrived,
        min(time) FILTER (kind = 'ADMITTED') AS admitted,
        min(time) FILTER (kind = 'FIRST_TOKEN') AS first_token,
        max(time) FILTER (kind = 'FINISHED') AS finished,
        max(args[1]) FILTER (kind = 'FINISHED') AS status,
        max(args[2]) FILTER (kind = 'ARRIVED') AS prompt_tokens,
        max(args[3]) FILTER (kind = 'ARRIVED') AS max_tokens,
        max(args[2]) FILTER (kind = 'LOOKED_UP' AND kv_group = 0) AS hit_tokens,
        count(*) FILTER (kind = 'PREEMPTED') AS preemptions,
        coalesce(sum(args[4]) FILTER (kind = 'PREEMPTED'), 0)::BIGINT AS tokens_lost,
        coalesce(sum(len(ids)) FILTER (kind = 'ALLOCATED'), 0)::BIGINT AS blocks_allocated,
        coalesce(sum(len(ids)) FILTER (kind = 'REUSED'), 0)::BIGINT AS blocks_reused
    FROM events
    WHERE request >= 0 AND kind IN (
        'ARRIVED', 'ADMITTED', 'FIRST_TOKEN', 'FINISHED', 'LOOKED_UP', 'PREEMPTED', 'ALLOCATED', 'REUSED'
    )
    GROUP BY ALL
)
LEFT JOIN names USING (engine, epoch, request)
"""

_POINTS: Final = """
CREATE VIEW points AS SELECT make_timestamp(at_ns // 1000) AS time, * EXCLUDE (packed, filename) FROM {files}
WHERE at_ns BETWEEN {since} AND {until}
"""

_FINDINGS: Final = """
CREATE VIEW findings AS
SELECT
    id, engine, code, severity, verdict, "to" AS state,
    make_timestamp(first_seen_ns // 1000) AS first_seen,
    make_timestamp(nullif(fired_ns, 0) // 1000) AS fired,
    make_timestamp(nullif(resolved_ns, 0) // 1000) AS resolved,
    explanation, requests, blocks, position
FROM transitions
"""

_FINDING_COLUMNS: Final = pa.schema(
    [
        ("id", pa.string()),
        ("engine", pa.string()),
        ("code", pa.string()),
        ("severity", pa.string()),
        ("verdict", pa.string()),
        ("to", pa.string()),
        ("first_seen_ns", pa.int64()),
        ("fired_ns", pa.int64()),
        ("resolved_ns", pa.int64()),
        ("explanation", pa.string()),
        ("requests", pa.list_(pa.string())),
        ("blocks", pa.list_(pa.int32())),
        ("position", pa.string()),
    ]
)


_VIEWS: Final = {"events": _EVENTS, "frames": _TABLE_NAMES, "points": _POINTS}
_FILES_OF: Final = {
    "events": {"events"},
    "requests": {"events", "frames"},
    "points": {"points"},
    "findings": set[str](),
}
"""The files that each table is made of."""


def _make_views(
    connection: duckdb.DuckDBPyConnection, query: str, segments: Sequence[SqlSegment], of: SqlInput
) -> None:
    """Create the tables of the docs. From an archive, only segments that the query may name."""
    if not segments:
        raise BadQuery("there is nothing to ask: no segment has been kept yet, or none of that time")
    named = [table for table in _FILES_OF if re.search(rf"\b{table}\b", query, re.IGNORECASE)]
    tables = named if named and of.archive is not None else list(_FILES_OF)
    files = set().union(*(_FILES_OF[table] for table in tables))
    for name in _VIEWS:
        if name in files:
            _make_view(connection, name, segments, of.window)
    if "frames" in files:
        connection.execute(_REQUESTS)
    _make_findings(connection, [*(_log_of(of.directory) if of.directory is not None else ()), *of.transitions])


def _make_view(
    connection: duckdb.DuckDBPyConnection, name: str, segments: Sequence[SqlSegment], window: TimeRange
) -> None:
    files = {segment: f"{segment.folder}/{name}.parquet" for segment in segments}
    gone = [segment.folder for segment in segments if not _is_there(segment.folder)]
    if gone:
        raise BadQuery(f"{gone[0]} was deleted while the query began, as what is too old is: ask again")
    kept = {segment: file for segment, file in files.items() if _is_there(file)}
    try:
        _execute_view(connection, name, kept, window)
    except duckdb.Error as error:
        sound = {
            segment: file for segment, file in kept.items() if _is_archived(file) or _is_readable(connection, file)
        }
        if not sound:
            raise BadQuery("there is nothing to ask: no segment that is kept can be read") from error
        _execute_view(connection, name, sound, window)


def _is_archived(path: str) -> bool:
    return path.startswith(f"{PROTOCOL}://")


def _is_there(path: str) -> bool:
    """Return whether a file or folder exists, or the manifest of one in the archive names it."""
    return _is_archived(path) or os.path.exists(path)


def _execute_view(
    connection: duckdb.DuckDBPyConnection, name: str, files: Mapping[SqlSegment, str], window: TimeRange
) -> None:
    once = _counted_once(connection, name, files)
    connection.execute(_VIEWS[name].format(files=once, since=window.since_ns, until=window.until_ns))


def _counted_once(connection: duckdb.DuckDBPyConnection, name: str, files: Mapping[SqlSegment, str]) -> str:
    """Return the relation of all files, each batch and point once. Names are repeated without harm, for a view groups
    them.
    """
    hidden = hidden_points(list(files)) if name == "points" else []
    shared = {each.folder for each in hidden} if name == "points" else overlapping(list(files))
    if not shared or name == "frames":
        return _parquet(files.values())
    of_one = [file for segment, file in files.items() if segment.folder not in shared]
    of_several = [file for segment, file in files.items() if segment.folder in shared]
    folder = f"left(filename, length(filename) - {len(f'/{name}.parquet')})"
    if name == "points":
        rows = ", ".join(f"({_quoted(each.folder)}, {each.from_ns}, {each.to_ns})" for each in hidden)
        connection.execute(f"CREATE TEMP TABLE hidden AS FROM (VALUES {rows}) AS of(folder, from_ns, to_ns)")
        test = (
            "NOT EXISTS (FROM hidden WHERE hidden.folder = {folder}"
            " AND one.at_ns BETWEEN hidden.from_ns AND hidden.to_ns)"
        )
    else:
        frames = _parquet(f"{file.removesuffix('events.parquet')}frames.parquet" for file in of_several)
        connection.execute(
            "CREATE TEMP TABLE owner AS SELECT engine, epoch, sequence,"
            f" min(left(filename, length(filename) - {len('/frames.parquet')})) AS folder"
            f" FROM {frames} WHERE NOT keyframe AND sequence >= 0 GROUP BY ALL"
        )
        test = (
            "sequence < 0 OR EXISTS (FROM owner WHERE owner.engine = one.engine AND owner.epoch = one.epoch"
            " AND owner.sequence = one.sequence AND owner.folder = {folder})"
        )
    once = f"SELECT * EXCLUDE (filename) FROM {_parquet(of_several)} AS one WHERE {test.format(folder=folder)}"
    return f"(SELECT * FROM {_parquet(of_one)} UNION ALL BY NAME {once})" if of_one else f"({once})"


def _make_findings(connection: duckdb.DuckDBPyConnection, transitions: Sequence[LoggedTransition]) -> None:
    """Only the last transition of a finding counts."""
    last = {each.id: each for each in transitions}.values()
    rows = [
        {
            **{
                name: getattr(each, name)
                for name in ("id", "severity", "to", "first_seen_ns", "fired_ns", "resolved_ns")
            },
            **{
                name: getattr(each.judgement, name) for name in ("engine", "code", "verdict", "explanation", "position")
            },
            "requests": list(each.judgement.requests),
            "blocks": list(each.judgement.blocks),
        }
        for each in last
    ]
    connection.register("transitions", pa.Table.from_pylist(rows, _FINDING_COLUMNS))
    connection.execute(_FINDINGS)


def _parquet(files: Iterable[str]) -> str:
    return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true, filename = true)"


def _is_readable(connection: duckdb.DuckDBPyConnection, file: str) -> bool:
    try:
        connection.execute(f"DESCRIBE SELECT * FROM {_parquet([file])}")
    except duckdb.Error:
        logger.warning("%s is damaged and is left out", file)
        return False
    return True


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
