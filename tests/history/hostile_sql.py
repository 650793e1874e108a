"""Statements that try to write, to outgrow their bounds or to outlast them, and queries that must go on working.

`{data}` is the directory of the service, `{segment}` a file of a closed segment in it, `{open}` an open one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

COPIES: Final = (
    "COPY (SELECT 'gone'::BLOB) TO '{data}/history/findings.jsonl' (FORMAT BLOB)",
    "EXPLAIN ANALYZE COPY (SELECT 'gone'::BLOB) TO '{data}/history/findings.jsonl' (FORMAT BLOB)",
    "EXPLAIN (ANALYZE) COPY (SELECT 1) TO '{segment}' (FORMAT CSV)",
    "EXPLAIN (ANALYZE, FORMAT JSON) COPY (SELECT 1) TO '{open}'",
    "explain/**/analyze/**/copy (select 1) to '{data}/history/x.csv'",
    "EXPLAIN -- a comment\nANALYZE COPY (SELECT 1) TO '{data}/x'",
    "EXPLAIN COPY (SELECT 1) TO '{data}/x'",
    "WITH a AS (COPY (SELECT 'gone'::BLOB) TO '{segment}' (FORMAT BLOB)) FROM a",
    "WITH a AS (COPY (SELECT 1) TO '{data}/history/new.csv') FROM a",
    "WITH a AS (COPY (FROM range(9)) TO '{data}/by' (FORMAT PARQUET, PARTITION_BY (range))) FROM a",
    "WITH a AS (COPY (SELECT 1) TO 'kvscope-history://0/events.parquet') FROM a",
    "WITH a AS (COPY (SELECT 1) TO 'kvscope-history://9/new.parquet' (FORMAT PARQUET)) FROM a",
    "(WITH a AS (COPY (SELECT 1) TO '{open}' (FORMAT CSV)) FROM a)",
    "EXPLAIN ANALYZE WITH a AS (COPY (SELECT 1) TO '{data}/x') FROM a",
    "EXPLAIN WITH a AS (COPY (SELECT 1) TO '{data}/x') FROM a",
    "SELECT (WITH a AS (COPY (SELECT 1) TO '{data}/x') SELECT count(*) FROM a)",
    "WITH b AS (WITH a AS (COPY (SELECT 1) TO '{data}/x') FROM a) FROM b",
    "WITH a AS MATERIALIZED (COPY (SELECT 1) TO '{data}/x' (OVERWRITE)) FROM a UNION ALL SELECT 2",
    "FROM query('WITH a AS (COPY (SELECT 1) TO ''{data}/x'') FROM a')",
    "FROM query('COPY (SELECT 1) TO ''{data}/x''')",
    "COPY events TO '{data}/x.parquet'",
    "COPY findings FROM '/etc/passwd'",
    "COPY FROM DATABASE memory TO other",
    "EXPORT DATABASE '{data}/x'",
    "IMPORT DATABASE '{data}'",
    "SELECT 1; COPY (SELECT 1) TO '{data}/x'",
    "SELECT 1;;COPY (SELECT 1) TO '{data}/x';",
    "/* SELECT */ COPY (SELECT 1) TO '{data}/x' -- SELECT 1",
    "\ufeffCOPY (SELECT 1) TO '{data}/x'",
    "\u00a0COPY\u2003(SELECT 1)\u00a0TO '{data}/x'",
    "EXPLAIN\u00a0ANALYZE\u2003COPY (SELECT 1) TO '{data}/x'",
    "\uff23\uff2f\uff30\uff39 (SELECT 1) TO '{data}/x'",
)
CHANGES: Final = (
    "CREATE TABLE t AS SELECT 1",
    "CREATE OR REPLACE TABLE events AS SELECT 1",
    "CREATE TEMP TABLE t (a INT)",
    "CREATE VIEW v AS SELECT 1",
    "CREATE OR REPLACE MACRO f(x) AS x + 1",
    "CREATE SECRET s (TYPE S3)",
    "CREATE SEQUENCE s",
    "CREATE TYPE t AS ENUM ('a')",
    "INSERT INTO findings VALUES (1)",
    "WITH a AS (INSERT INTO events VALUES (1) RETURNING *) FROM a",
    "WITH a AS (DELETE FROM events RETURNING *) FROM a",
    "WITH a AS (UPDATE findings SET id = '' RETURNING *) FROM a",
    "UPDATE points SET running = 0",
    "DELETE FROM events",
    "TRUNCATE events",
    "MERGE INTO events USING points ON true WHEN MATCHED THEN DELETE",
    "DROP VIEW events",
    "ALTER VIEW events RENAME TO e",
    "COMMENT ON VIEW events IS 'x'",
    "PRAGMA enable_profiling",
    "PRAGMA profiling_output='{data}/x'",
    "PRAGMA database_size",
    "SET threads = 64",
    "SET memory_limit = '64GB'",
    "SET temp_directory = '{data}'",
    "SET enable_external_access = true",
    "SET VARIABLE x = 1",
    "RESET memory_limit",
    "RESET allowed_directories",
    "ATTACH '{data}/x.db'",
    "ATTACH '{data}/alerts.sqlite' AS alerts (TYPE SQLITE)",
    "DETACH memory",
    "INSTALL httpfs",
    "LOAD '{data}/x.duckdb_extension'",
    "UPDATE EXTENSIONS",
    "CALL force_checkpoint()",
    "CHECKPOINT",
    "VACUUM",
    "ANALYZE",
    "USE memory",
    "BEGIN TRANSACTION",
    "PREPARE p AS SELECT 1",
    "EXECUTE p",
    "DEALLOCATE p",
    "FROM enable_logging('QueryLog', storage := 'file', storage_path := '{data}')",
    "FROM enable_profiling(format := 'json', save_location := '{data}/x')",
    "FROM force_checkpoint()",
)
READS_ELSEWHERE: Final = (
    "FROM read_text('{data}/alerts.sqlite')",
    "FROM read_text('/etc/passwd')",
    "FROM read_blob('/proc/self/environ')",
    "FROM read_csv('/etc/passwd')",
    "FROM '/etc/passwd'",
    "FROM '{data}/history/findings.jsonl'",
    "FROM read_json('{data}/history/findings.jsonl')",
    "FROM sniff_csv('/etc/passwd')",
    "FROM glob('/etc/*')",
    "FROM glob('kvscope-history://*')",
    "FROM read_parquet('kvscope-history://0/../../findings.jsonl')",
    "FROM read_text('kvscope-history:///etc/passwd')",
    "FROM read_parquet('https://127.0.0.1:9/x.parquet')",
    "FROM parquet_metadata('/tmp/x.parquet')",
    "FROM read_duckdb('{data}/x.db')",
    "SELECT getenv('HOME')",
    "SELECT content FROM read_text('file:///etc/passwd')",
)
LARGE: Final = (
    "SELECT repeat('x', 1000000) FROM range(3000)",
    "SELECT repeat('x', 33 * 1024 * 1024)",
    "SELECT repeat('x', 31 * 1024 * 1024) AS just_below",
    "SELECT repeat('x', 4000000000)",
    "SELECT range(100000000)",
    "SELECT range FROM range(100000000)",
    "SELECT list_aggregate(range(50000000), 'string_agg', '-')",
    "SELECT list_transform(range(10000), x -> range(10000))",
    "SELECT string_agg(repeat('y', 1000), '') FROM range(10000000)",
    "SELECT histogram(range) FROM range(50000000)",
    "SELECT " + ", ".join(f"repeat('{number % 10}', 100000) AS c{number}" for number in range(2000)),
    "FROM range(1000000) a, range(1000) b ORDER BY hash(a.range + b.range) DESC",
    " UNION ALL ".join(["SELECT 1"] * 5000),
    "SELECT " + "(" * 5000 + "1" + ")" * 5000,
    "SELECT " + "[" * 900 + "1" + "]" * 900,
    "SELECT " + "1 + " * 20000 + "1",
    "SELECT rpad('', 2000000000, 'x')",
    "SELECT bitstring('1', 2000000000)",
)
ENDLESS: Final = (
    "SELECT count(*) FROM range(3000000) a, range(3000000) b WHERE a.range * b.range = 7",
    "WITH RECURSIVE r AS (SELECT 1 AS x UNION ALL SELECT x + 1 FROM r) SELECT max(x) FROM r",
    "WITH RECURSIVE r AS (SELECT 1 AS x UNION ALL SELECT x * 2 % 97 + 1 FROM r, range(3)) FROM r",
    "SELECT sum(a.range ^ 0.5) FROM range(100000000000) a",
    "SELECT count(*) FROM events a, events b, events c, events d WHERE a.at_ns + b.at_ns > c.at_ns + d.at_ns",
    "SELECT regexp_matches(repeat('a', 100000) || 'b', '(a*)*c') FROM range(100000)",
)
HOSTILE: Final = (*COPIES, *CHANGES, *READS_ELSEWHERE, *LARGE, *ENDLESS)
READS: Final = (
    "SELECT kind, count(*) AS n FROM events GROUP BY kind",
    "FROM requests",
    "WITH a AS (SELECT request FROM events) SELECT count(*) AS n FROM a",
    "DESCRIBE points",
    "SUMMARIZE findings",
    "SHOW TABLES",
    "EXPLAIN SELECT * FROM events",
    "-- a comment\n SELECT 1 AS one FROM events LIMIT 1;",
)
"""Each form that docs/history.md names."""


def fingerprint(directory: Path) -> dict[str, tuple[object, ...]]:
    """Each path below `directory` with its kind, mode, size, time and content."""
    found: dict[str, tuple[object, ...]] = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        found[os.fspath(path)] = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino, content)
    return found


def aimed(statement: str, data: Path, engine: str = "*") -> str:
    """The statement with the paths of its targets: the directory of a service, and segments of an engine in it."""
    segment = next((data / "history").glob(f"{engine}/*/*/events.parquet"))
    opened = next((data / "history").glob(f"{engine}/*.kvj"), data / "history" / "closed.kvj")
    for name, path in (("data", data), ("segment", segment), ("open", opened)):
        statement = statement.replace(f"{{{name}}}", os.fspath(path))
    return statement
