"""SQL over what was kept, closed segments and open ones alike: the tables `events`, `requests`, `findings`, `points`.

A query reads Parquet only: open segments are turned into it in a folder of their own that goes again. It runs in
memory, may read the history's files and no others, and cannot write.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import duckdb
import pyarrow as pa

from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.events.kinds import Status
from kvscope.monitor.history.findings_log import FindingsLog, LoggedTransition
from kvscope.monitor.history.sealed_segment import points_table, write_table, write_tables
from kvscope.monitor.history.segment_files import ClosedSegment, HistorySegment, history_segments
from kvscope.monitor.ledger.engine_ledger import Point

THREADS: Final = 2
MEMORY: Final = "2GB"
QUERY_TIMEOUT_S: Final = 60.0
"""How long a query may take, unless a timeout is given."""


logger = logging.getLogger(__name__)


class BadQuery(KvscopeError, ValueError):
    """The query cannot be run; the message says why."""


class SqlAnswer(NamedTuple):
    """The columns' names, and the rows as they come."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]


@contextmanager
def answer(
    query: str,
    directory: Path,
    points: Mapping[str, Sequence[Point]] | None = None,
    told: Iterable[LoggedTransition] = (),
    timeout_s: float = QUERY_TIMEOUT_S,
) -> Iterator[SqlAnswer]:
    """Run `query` over the history or the recording in `directory`. Of a recording, which keeps neither, `points` by
    engine and what was `told` of findings can be given. The query and reading its rows may take `timeout_s` together.
    Raises BadQuery.
    """
    _check_sql(query)
    with TemporaryDirectory(prefix="kvscope-sql-") as scratch, duckdb.connect(":memory:") as connection:
        folders = [segment.path for segment in _closed(directory, Path(scratch))]
        for number, (engine, of_engine) in enumerate((points or {}).items()):
            folder = Path(scratch) / f"points-{number}"
            folder.mkdir()
            write_table(points_table(engine, 0, of_engine), folder / "points.parquet")
            folders.append(folder)
        _make_views(connection, folders, [*_log_of(directory), *told])
        allowed = ", ".join(_quoted(path) for path in (directory.resolve(), scratch))
        for setting in (
            "TimeZone = 'UTC'",
            f"threads = {THREADS}",
            f"memory_limit = {_quoted(MEMORY)}",
            f"temp_directory = {_quoted(scratch)}",
            f"allowed_directories = [{allowed}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            connection.execute(f"SET {setting}")
        timer = threading.Timer(timeout_s, connection.interrupt)
        timer.start()
        try:
            cursor = connection.execute(query)
            yield SqlAnswer([column[0] for column in cursor.description or ()], _rows(cursor))
        except duckdb.InterruptException as error:
            raise BadQuery(f"the query was stopped after {timeout_s:g} s: ask for less, or give --timeout") from error
        except duckdb.Error as error:
            raise BadQuery(_told_plainly(error)) from error
        finally:
            timer.cancel()
            timer.join()


def _check_sql(query: str) -> None:
    try:
        statements = duckdb.extract_statements(query)
    except duckdb.Error as error:
        raise BadQuery(_told_plainly(error)) from error
    reads = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in reads:
        raise BadQuery("one query that reads, please: SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, SHOW TABLES or EXPLAIN")


def _told_plainly(error: duckdb.Error) -> str:
    return f"the query cannot be run: {error}"


def _rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while some := cursor.fetchmany(10_000):
        yield from some


def _closed(directory: Path, scratch: Path) -> Iterator[ClosedSegment]:
    """All segments, those that are open made closed ones in `scratch`."""
    of_engines = [path for path in directory.iterdir() if path.is_dir()]
    for number, engine in enumerate([directory, *of_engines]):
        for segment in history_segments(engine):
            closed = _as_closed(segment, scratch / str(number))
            if closed is not None:
                yield closed


def _as_closed(segment: HistorySegment, into: Path) -> ClosedSegment | None:
    if isinstance(segment, ClosedSegment):
        return segment
    try:
        return write_tables(segment.path, into)
    except FileNotFoundError:  # it was closed just now
        again = {
            closed[:2]: closed for closed in history_segments(segment.path.parent) if isinstance(closed, ClosedSegment)
        }
        return again.get(segment[:2])


def _log_of(directory: Path) -> list[LoggedTransition]:
    return FindingsLog(directory).read()


# -------------------------------------------------------------------- the tables

_EVENTS: Final = """
CREATE VIEW events AS
SELECT
    engine, epoch, sequence, event, make_timestamp(at_ns // 1000) AS time, at_ns,
    kind, kv_group, request, args, hashes, ids
FROM {events}
"""

_TABLE_NAMES: Final = """
CREATE VIEW names AS
SELECT engine, epoch, request, any_value(id) AS id
FROM (
    SELECT engine, epoch, unnest(map_keys(texts)) AS request, unnest(map_values(texts)) AS id
    FROM {frames} WHERE cardinality(texts) > 0
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
CREATE VIEW points AS SELECT make_timestamp(at_ns // 1000) AS time, * EXCLUDE (packed) FROM {points}
"""

_FINDINGS: Final = """
CREATE VIEW findings AS
SELECT
    id, engine, code, severity, verdict, "to" AS state,
    make_timestamp(first_seen_ns // 1000) AS first_seen,
    make_timestamp(nullif(fired_ns, 0) // 1000) AS fired,
    make_timestamp(nullif(resolved_ns, 0) // 1000) AS resolved,
    explanation, requests, blocks, position
FROM told
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


def _make_views(connection: duckdb.DuckDBPyConnection, folders: list[Path], told: list[LoggedTransition]) -> None:
    """The tables of the docs. Of a finding there is the last that was told."""
    for name, view in (("events", _EVENTS), ("frames", _TABLE_NAMES), ("points", _POINTS)):
        files = [path for folder in folders if (path := folder / f"{name}.parquet").exists()]
        if not files:
            raise BadQuery("there is nothing to ask: no segment has been kept yet")
        try:
            connection.execute(view.format(**{name: _parquet(files)}))
        except duckdb.Error as error:
            sound = [file for file in files if _is_readable(connection, file)]
            if not sound:
                raise BadQuery("there is nothing to ask: no segment that is kept can be read") from error
            connection.execute(view.format(**{name: _parquet(sound)}))
    connection.execute(_REQUESTS)
    last = {each.id: each for each in told}.values()
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
    connection.register("told", pa.Table.from_pylist(rows, _FINDING_COLUMNS))
    connection.execute(_FINDINGS)


def _parquet(files: Iterable[Path]) -> str:
    return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true)"


def _is_readable(connection: duckdb.DuckDBPyConnection, file: Path) -> bool:
    try:
        connection.execute(f"DESCRIBE SELECT * FROM {_parquet([file])}")
    except duckdb.Error:
        logger.warning("%s is damaged and is left out", file)
        return False
    return True


def _quoted(text: str | Path) -> str:
    return "'" + os.fspath(text).replace("'", "''") + "'"
