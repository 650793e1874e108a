"""Long history in an object store: uploads, and questions to it through DuckDB and ClickHouse, with equal answers.

    python -m benchmarks.archive --events 100000000 --chdb .venv-chdb/bin/python

The store is moto's S3 server on this machine, in a process of its own, so times have no network in them. The questions
are those of docs/history.md: events by kind, blocks held for more than 20 s with their owner, and the requests at a
moment with their blocks. `monitor sql` asks through DuckDB, with its limits of two threads and 2 GB. ClickHouse, as
chDB, has its own defaults. Without --chdb it is left out. Exits with 1 if two answers differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.history import TakenIn, row, take_in
from benchmarks.machine import machine
from kvscope.monitor.history.archive_store import Archive
from kvscope.monitor.history.archiver import Archiver
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.history.sql_query import SqlSource, TimeRange
from kvscope.monitor.history.sql_tables import with_answer
from tests.history.clickhouse import IN_DUCKDB, documented, run_clickhouse
from tests.history.object_store import BUCKET, ENVIRONMENT, object_store

PREFIX = "bench"
QUESTIONS = ("events by kind", "blocks held for more than 20 s", "requests at a moment")
LONGEST = """
SELECT epoch_ns(finished) FROM requests WHERE epoch_ns(finished) > {middle_ns} ORDER BY finished - admitted DESC LIMIT 1
"""


def main() -> int:
    """Run it. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000_000, metavar="N", help="(5,000,000)")
    parser.add_argument("--blocks", type=int, default=20_000, metavar="N", help="of the pool (20,000)")
    parser.add_argument("--chdb", default="", metavar="PYTHON", help="a Python that has chDB")
    parsed = parser.parse_args()
    print(machine("pyarrow", "duckdb", "obstore"))
    with tempfile.TemporaryDirectory(prefix="kvscope-archive-") as folder, object_store() as endpoint:
        os.environ |= {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
        began_s = time.perf_counter()
        kept = take_in(Path(folder), parsed.events, parsed.blocks, Counter())
        print(f"\n{kept.events:,} events, {kept.raw / 1e6:,.0f} MB as sent", end=", ")
        print(f"{(kept.to_ns - kept.from_ns) / 6e10:.0f} minutes of an engine")
        row("s to make and keep them", time.perf_counter() - began_s)
        archive = upload(Path(folder), kept)
        return 1 if ask(archive, endpoint, parsed.chdb, last_of_the_longest_ns(archive, kept), kept) else 0


def upload(history: Path, kept: TakenIn) -> Archive:
    """Archive all of it, and delete it from the disk."""
    archive = Archive(f"s3://{BUCKET}/{PREFIX}")
    archiver = Archiver(history, archive)
    began_s = time.perf_counter()
    archiver.archive_all()
    took_s, figures = time.perf_counter() - began_s, archiver.figures()
    row(f"s to archive {figures.segments} segments of {figures.bytes / 1e6:,.0f} MB", took_s)
    row("  MB a second", figures.bytes / 1e6 / took_s)
    shutil.rmtree(directory_of(history, kept.engine))
    return archive


def last_of_the_longest_ns(archive: Archive, kept: TakenIn) -> int:
    """Return the moment before the request that ran longest finished, so that blocks have been held for long. It is
    one of the second half, so that the queries read most of the archive.
    """
    rows, _ = through_duckdb(LONGEST.format(middle_ns=(kept.from_ns + kept.to_ns) // 2), archive)
    return int(rows[0][0]) - 1


def ask(archive: Archive, endpoint: str, chdb: str, at_ns: int, kept: TakenIn) -> bool:
    """Ask each question and print what each takes. Whether two answers differ."""
    answers = run_clickhouse(chdb, documented(endpoint, BUCKET, PREFIX, at_ns))[2:] if chdb else []
    differ = False
    for number, (question, query) in enumerate(zip(QUESTIONS, IN_DUCKDB, strict=True)):
        rows, took_s = through_duckdb(query.format(at_ns=at_ns), archive)
        row(f"s for {question}, DuckDB ({len(rows):,} rows)", took_s)
        if answers:
            row("  ClickHouse", answers[number]["seconds"])
            differ |= rows != answers[number]["rows"]
            print("  equal answers" if rows == answers[number]["rows"] else "  THE ANSWERS DIFFER")
    minute = TimeRange(at_ns - 30_000_000_000, at_ns + 30_000_000_000)
    rows, took_s = through_duckdb(IN_DUCKDB[0], archive, minute)
    share = sum(int(count) for _, count in rows) / kept.events
    row(f"s for events by kind of a minute of it ({share:.2%})", took_s)
    return differ


def through_duckdb(query: str, archive: Archive, window: TimeRange | None = None) -> tuple[list[list[Any]], float]:
    """Return the rows of a query, and the seconds that it took."""
    began_s = time.perf_counter()
    of = SqlSource(None, archive.url, window or TimeRange())
    rows = with_answer(query, of, lambda found: [list(each) for each in found.rows])
    return rows, time.perf_counter() - began_s


if __name__ == "__main__":
    raise SystemExit(main())
