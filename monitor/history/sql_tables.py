"""SQL over what was kept, closed segments and open ones alike: the tables `events`, `requests`, `findings`, `points`.

A query reads Parquet only: open segments are turned into it in a folder of their own that goes again. It runs in
memory, reads the files of the history and of its archive through file systems that cannot write, and no other file.
sql_process.py runs it in a process of its own, which bounds what it takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple, TypeVar

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ..base import limits
from ..contract.kinds import Status
from .archive_store import Archive
from .sql_files import HISTORY_PROTOCOL, PROTOCOL, ArchiveFiles, LocalFiles
from .sql_query import BadQuery, SqlSource
from .sql_segments import (
    DAMAGED,
    LocalSegments,
    SqlSegment,
    hidden_points,
    overlapping,
    segments_on_disk,
    with_archived,
)

OF_QUERY: Final = (
    duckdb.BinderException,
    duckdb.CatalogException,
    duckdb.ConversionException,
    duckdb.OutOfRangeException,
    duckdb.ParserException,
    duckdb.PermissionException,
)
"""What a query itself can be wrong in. Anything else may be damage, for which the segments are looked through."""
Taken = TypeVar("Taken")


class SqlAnswer(NamedTuple):
    """The columns' names, the rows as they come, and what of the history is not in them, a line each."""

    columns: list[str]
    rows: Iterator[tuple[Any, ...]]
    left_out: list[str]


class SqlRoom(NamedTuple):
    """What a query may take: memory of DuckDB, disk for what is beyond it. `seal` is called before it begins."""

    memory_bytes: int = limits.SQL_COMMAND_MEMORY_BYTES
    spill_bytes: int = limits.SQL_SPILL_BYTES
    seal: Callable[[], None] = lambda: None


class _Files(NamedTuple):
    """What a query reads. `local` has what was left out of it."""

    segments: list[SqlSegment]
    local: LocalSegments
    on_disk: LocalFiles
    archived: ArchiveFiles | None

    def of(self, view: str) -> dict[SqlSegment, str]:
        """Return the files of a view, of segments in which nothing has been found wrong with what it needs."""
        return {
            segment: f"{segment.folder}/{view}.parquet"
            for segment in self.segments
            if all(self._has(f"{segment.folder}/{each}.parquet") for each in _NEEDS[view])
        }

    def _has(self, file: str) -> bool:
        return _is_archived(file) or (self.on_disk.exists(file) and self._path(file) not in self.local.left_out)

    def find_damage(self, files: Iterable[str]) -> bool:
        """Leave out the files on disk that cannot be read whole. Return whether there were any more."""
        paths = [self._path(file) for file in files if not _is_archived(file)]
        damaged = [path for path in paths if path not in self.local.left_out and not _is_sound(path)]
        self.local.left_out.update(dict.fromkeys(damaged, DAMAGED))
        return bool(damaged)

    def _path(self, file: str) -> Path:
        return self.on_disk.paths[file.removeprefix(f"{HISTORY_PROTOCOL}://")]


def with_answer(query: str, of: SqlSource, take: Callable[[SqlAnswer], Taken], room: SqlRoom | None = None) -> Taken:
    """Run `query` and return what `take` makes of the answer. `take` is called again if a damaged segment is met while
    the rows come: then without that segment.

    Raises BadQuery, BadTarget and MemoryError.
    """
    room = room or SqlRoom()
    with TemporaryDirectory(prefix="kvscope-sql-") as scratch:
        files = _files_of(of, Path(scratch))
        room.seal()
        while True:
            read: set[str] = set()
            is_asked = False
            try:
                with _connected(files, room, scratch) as connection:
                    checked = _one_select(connection, query)
                    _make_tables(connection, query, files, of, read)
                    _lock_down(connection)
                    is_asked = True
                    cursor = connection.execute(checked)
                    columns = [column[0] for column in cursor.description or ()]
                    return take(SqlAnswer(columns, _rows(cursor), _left_out(files)))
            except duckdb.Error as error:
                if files.archived is not None and files.archived.error:
                    raise BadQuery(f"the archive cannot be read: {files.archived.error}") from error
                is_of_query = is_asked and isinstance(error, OF_QUERY)
                if not is_of_query and files.find_damage(read):
                    continue
                if isinstance(error, duckdb.OutOfMemoryException):
                    raise MemoryError from error
                raise BadQuery(f"the query cannot be run: {error}") from error


def _files_of(of: SqlSource, scratch: Path) -> _Files:
    local = LocalSegments(of.directory, scratch, of.window)
    on_disk = LocalFiles()
    archived: ArchiveFiles | None = None
    if of.archive:
        segments, archived = with_archived(local, on_disk, Archive(of.archive), of.window)
    else:
        segments = segments_on_disk(local, on_disk)
    for folder in sorted(of.judged.iterdir()) if of.judged is not None else ():
        if folder.is_dir():
            segments.append(SqlSegment(on_disk.folder(folder)[0], folder.name, 0))
    return _Files(segments, local, on_disk, archived)


def _left_out(files: _Files) -> list[str]:
    return [f"{path} {why} and is left out" for path, why in sorted(files.local.left_out.items())]


@contextmanager
def _connected(files: _Files, room: SqlRoom, scratch: str) -> Iterator[duckdb.DuckDBPyConnection]:
    config: dict[str, str | bool | int | float | list[str]] = {
        "threads": limits.SQL_THREADS,
        "memory_limit": f"{room.memory_bytes}B",
        "temp_directory": f"{scratch}/spill" if room.spill_bytes else "",
        "max_temp_directory_size": f"{room.spill_bytes}B",
    }
    with duckdb.connect(":memory:", config=config) as connection:
        connection.register_filesystem(files.on_disk)
        if files.archived is not None:
            connection.register_filesystem(files.archived)
        connection.execute("SET TimeZone = 'UTC'")
        yield connection


def _lock_down(connection: duckdb.DuckDBPyConnection) -> None:
    """Let the query read what the read-only file systems have and nothing else, and change nothing."""
    for statement in (
        f"SET allowed_directories = ['{HISTORY_PROTOCOL}://', '{PROTOCOL}://']",
        "SET enable_external_access = false",
        "SET lock_configuration = true",
        "BEGIN TRANSACTION READ ONLY",
    ):
        connection.execute(statement)


# -------------------------------------------------------------------- the statement

_EXPLAIN: Final = re.compile(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*explain\b", re.IGNORECASE | re.DOTALL)
_NODE: Final = re.compile(r'"type":"(\w+_NODE)"')
"""In a string of the query the quotes would have a backslash before them."""
_READING: Final = {"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"}


class _Parsed(msgspec.Struct):
    """How DuckDB describes a query, if it is a SELECT."""

    error: bool
    error_type: str = ""
    error_message: str = ""
    statements: list[msgspec.Raw] = []


def _one_select(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """Return the query if it is one SELECT, which a statement's type does not say: a WITH may hold COPY and INSERT, and
    EXPLAIN ANALYZE runs what it explains. Raises BadQuery.
    """
    explained = _EXPLAIN.match(query)
    select = query[explained.end() :] if explained else query
    ((found,),) = connection.execute("SELECT json_serialize_sql(?)", [select]).fetchall()
    parsed = msgspec.json.decode(found, type=_Parsed)
    if parsed.error_type == "parser" and not explained:
        raise BadQuery(f"the query cannot be run: {parsed.error_message}")
    if parsed.error or len(parsed.statements) != 1 or not set(_NODE.findall(found)) <= _READING:
        raise BadQuery(
            "one query that reads, please: SELECT, FROM, WITH, DESCRIBE, SUMMARIZE, SHOW TABLES, or EXPLAIN of one"
        )
    return f"EXPLAIN {select}" if explained else select


def _rows(cursor: duckdb.DuckDBPyConnection) -> Iterator[tuple[Any, ...]]:
    while some := cursor.fetchmany(100):
        yield from some


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
_NEEDS: Final = {"events": ("events", "frames"), "frames": ("frames",), "points": ("points",)}
"""The files of a segment without which its rows of a view cannot be told."""


def _make_tables(
    connection: duckdb.DuckDBPyConnection, query: str, files: _Files, of: SqlSource, read: set[str]
) -> None:
    """Create the tables of the docs that the query may name, all if it names none. `read`: the files of them."""
    if not files.segments:
        left = _left_out(files)
        why = f": {'; '.join(left)}" if left else ": no segment has been kept yet, or none of that time"
        raise BadQuery(f"there is nothing to ask{why}")
    named = [table for table in _FILES_OF if re.search(rf"\b{table}\b", query, re.IGNORECASE)]
    tables = named or list(_FILES_OF)
    of_tables = set().union(*(_FILES_OF[table] for table in tables))
    for name in _VIEWS:
        if name in of_tables:
            found = files.of(name)
            if not found:
                raise BadQuery(f"there is nothing to ask: {'; '.join(_left_out(files)) or f'no {name} are kept'}")
            read |= {f"{segment.folder}/{each}.parquet" for segment in found for each in _NEEDS[name]}
            once = _counted_once(connection, name, found)
            connection.execute(_VIEWS[name].format(files=once, since=of.window.since_ns, until=of.window.until_ns))
    if "frames" in of_tables:
        connection.execute(_REQUESTS)
    if "findings" in tables:
        _make_findings(connection, [each for each in (of.directory, of.judged) if each is not None])


def _is_archived(file: str) -> bool:
    return file.startswith(f"{PROTOCOL}://")


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


def _make_findings(connection: duckdb.DuckDBPyConnection, directories: Collection[Path]) -> None:
    """Only the last transition of a finding counts."""
    from .findings_log import FindingsLog  # it knows every detector, which takes a while

    last = {each.id: each for directory in directories for each in FindingsLog(directory).read()}.values()
    rows = [msgspec.structs.asdict(each.judgement) | msgspec.structs.asdict(each) for each in last]
    connection.register("transitions", pa.Table.from_pylist(rows, _FINDING_COLUMNS))
    connection.execute(_FINDINGS)


def _parquet(files: Iterable[str]) -> str:
    return f"read_parquet([{', '.join(map(_quoted, files))}], union_by_name = true, filename = true)"


def _is_sound(path: Path) -> bool:
    """Whether each page of a Parquet file can be read and has its checksum."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                file.read_row_group(number, use_threads=False)
    except Exception:  # damage raises errors of any type
        return False
    return True


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
