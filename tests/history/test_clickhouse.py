"""ClickHouse reads an archive with the queries of the docs, and answers what `monitor sql` does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvscope.monitor.history.archive_store import Archive
from kvscope.monitor.history.archiver import Archiver
from kvscope.monitor.history.sql_query import SqlSource
from tests.history.archived import kept
from tests.history.clickhouse import DOCS, IN_DUCKDB, chdb_python, documented, run_clickhouse
from tests.history.object_store import BUCKET, ENVIRONMENT, object_store
from tests.history.queried import tuples_of
from tests.history.recorded import worked

pytestmark = pytest.mark.usefixtures("archive_runtime")


@pytest.mark.slow
def test_both_answer_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = chdb_python()
    lab = worked(400, seed=5)
    lab.step(30.0)  # what is held now was held for 30 s
    lab.heartbeat()
    closed = kept(tmp_path / "history", lab)
    at_ns = lab.frames[-1].wall_ns
    with object_store() as endpoint:
        for name, value in (*ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", endpoint)):
            monkeypatch.setenv(name, value)
        archive = Archive(f"s3://{BUCKET}/click/house")
        Archiver(tmp_path / "history", archive).archive_all()
        # A segment without a manifest: an upload that has not ended.
        archive.upload(closed[0] / "events.parquet", f"segments/{closed[0].parent.parent.name}/half/events.parquet")
        answers = run_clickhouse(python, documented(endpoint, BUCKET, "click/house", at_ns))[2:]
        for query, found in zip(IN_DUCKDB, answers, strict=True):
            rows = [list(row) for row in tuples_of(query.format(at_ns=at_ns), SqlSource(None, archive.url))]
            assert rows
            assert found["rows"] == rows


@pytest.mark.prove
def test_a_hundred_million_events_in_an_object_store(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks held for more than 20 s with their owner, and the state at a moment: equal answers, and their times."""
    events = os.environ.get("MONITOR_ARCHIVE_EVENTS", "100000000")
    command = [sys.executable, "-m", "benchmarks.archive", "--events", events, "--chdb", chdb_python()]
    done = subprocess.run(command, cwd=DOCS.parent.parent, capture_output=True, text=True, check=False)
    with capsys.disabled():
        print(f"\n{done.stdout}")
    assert done.returncode == 0, done.stderr[-2_000:]
    assert done.stdout.count("equal answers") == len(IN_DUCKDB)
