"""An archive holds each closed segment once and whole, whatever happens to its writer, and SQL reads it as the disk."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base.errors import BadTarget
from kvscope.monitor.history import archiver as archiver_module
from kvscope.monitor.history.archive_store import Archive, SegmentRange
from kvscope.monitor.history.archiver import Archiver
from kvscope.monitor.history.retention import Keep, Keeper
from kvscope.monitor.history.sql_files import PROTOCOL, ArchiveFiles
from kvscope.monitor.history.sql_query import BadQuery, SqlBounds, SqlSource, TimeRange
from kvscope.monitor.history.sql_segments import HiddenPoints, SqlSegment, hidden_points, overlapping
from kvscope.monitor.terminal.cli import main
from tests.history.archived import closed_of, kept
from tests.history.object_store import BUCKET, ENVIRONMENT, object_store
from tests.history.queried import asked, rows_of
from tests.history.recorded import worked
from tests.history.test_kept_samples import kept_in
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("archive_runtime")

ALWAYS = TimeRange()
QUERIES = (
    "SELECT * EXCLUDE (time) FROM events ORDER BY ALL",
    "SELECT * FROM requests ORDER BY request",
    "SELECT * FROM points ORDER BY at_ns",
)
ROOT = Path(__file__).parent.parent.parent
counter = itertools.count()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture(params=["directory", "s3"])
def url(request: pytest.FixtureRequest, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return str(tmp_path / "archive") if request.param == "directory" else s3(endpoint, monkeypatch)


def s3(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in (*ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", endpoint)):
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/of/test-{next(counter)}"


@pytest.fixture(scope="module")
def lab() -> Lab:
    return worked(200, seed=5)


def ask(query: str, of: SqlSource) -> list[dict[str, Any]]:
    return rows_of(query, of)


def all_rows(of: SqlSource) -> list[list[dict[str, Any]]]:
    return [ask(query, of) for query in QUERIES]


@pytest.mark.slow
def test_disk_and_archive_give_the_same_rows_as_the_disk_alone(tmp_path: Path, lab: Lab, url: str) -> None:
    history = tmp_path / "history"
    closed = kept(history, lab)
    assert len(closed) > 3
    before = all_rows(SqlSource(history))
    assert all(before)
    archive = Archive(url, make=True)
    archiver = Archiver(history, archive)
    archiver.archive_all()
    assert archiver.figures().segments == len(closed)
    assert archiver.problem() == ""
    assert all_rows(SqlSource(history, archive=archive.url)) == before
    for path in closed[:-2]:  # as retention does; two are in both places still
        shutil.rmtree(path)
    assert len(ask(QUERIES[0], SqlSource(history))) < len(before[0])
    assert all_rows(SqlSource(history, archive=archive.url)) == before
    (rows,) = ask("SELECT count(*) AS n FROM events", SqlSource(None, archive=archive.url))
    assert 0 < rows["n"] < len(before[0])  # the open segment is on the disk alone


def test_a_restart_uploads_nothing_twice(tmp_path: Path, lab: Lab) -> None:
    closed = kept(tmp_path / "history", lab)
    for expected in (len(closed), 0):
        archiver = Archiver(tmp_path / "history", Archive(str(tmp_path / "archive"), make=True))
        archiver.archive_all()
        assert archiver.figures().segments == expected
    # An archive elsewhere has none of them.
    other = Archiver(tmp_path / "history", Archive(str(tmp_path / "other"), make=True))
    other.archive_all()
    assert other.figures().segments == len(closed)


@pytest.mark.slow
@pytest.mark.parametrize("kill_at", [1, 3, 6])  # before the first file, between two files, before the manifest
def test_a_segment_is_seen_whole_or_not_at_all(
    tmp_path: Path, lab: Lab, endpoint: str, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    history, url = tmp_path / "history", s3(endpoint, monkeypatch)
    closed = kept(history, lab)
    before = ask("SELECT count(*) AS n FROM events", SqlSource(history))
    command = [sys.executable, "-m", "tests.history.archived", str(history), url, str(kill_at + 6)]
    killed = subprocess.run(command, cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    archive = Archive(url)
    assert len(list(archive.segments(*ALWAYS))) == 1
    assert ask("SELECT count(*) AS n FROM events", SqlSource(history, archive=archive.url)) == before
    archiver = Archiver(history, archive)
    archiver.archive_all()
    assert archiver.figures().segments == len(closed) - 1
    assert len(list(archive.segments(*ALWAYS))) == len(closed)


def test_a_commit_without_its_marker_is_found(tmp_path: Path, lab: Lab) -> None:
    closed = kept(tmp_path / "history", lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    Archiver(tmp_path / "history", archive).archive_all()
    for path in closed:
        (path / archiver_module.MARKER_FILE).unlink()
    before = ask(QUERIES[0], SqlSource(tmp_path / "history"))
    assert ask(QUERIES[0], SqlSource(tmp_path / "history", archive=archive.url)) == before
    Archiver(tmp_path / "history", archive).archive_all()
    assert len(list(archive.segments(*ALWAYS))) == len(closed)


def test_two_writers_of_one_engine_count_once(tmp_path: Path, lab: Lab) -> None:
    """They cut their segments at other places, and one has missed a part."""
    kept(tmp_path / "all" / "history", lab, 1 << 30)
    archive = Archive(str(tmp_path / "archive"), make=True)
    writers = [tmp_path / "a", tmp_path / "b"]
    kept(writers[0], lab, 15_000)
    kept(writers[1], lab, 23_000, first=60)
    threads = [threading.Thread(target=Archiver(writer, archive).archive_all) for writer in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(archive.segments(*ALWAYS))) == sum(len(closed_of(writer, lab)) for writer in writers)
    for of in (SqlSource(None, archive=archive.url), SqlSource(writers[0], archive=archive.url)):
        rows = ask("SELECT * EXCLUDE (time) FROM events WHERE sequence >= 0 ORDER BY sequence, event", of)
        until = rows[-1]["sequence"]
        stated = ask(
            f"SELECT * EXCLUDE (time) FROM events WHERE sequence BETWEEN 0 AND {until} ORDER BY sequence, event",
            SqlSource(tmp_path / "all" / "history"),
        )
        assert rows == stated
        points = ask("SELECT at_ns, count(*) AS n FROM points GROUP BY at_ns HAVING n > 1", of)
        assert points == []
    assert len(ask("FROM points", SqlSource(None, archive=archive.url))) > 10


def test_segments_that_share_nothing_are_read_as_they_are() -> None:
    def segment(folder: str, first: int, last: int, epoch: int = 1) -> SqlSegment:
        return SqlSegment(folder, "e", epoch, SegmentRange((first, last), (first * 10, last * 10)))

    apart = [segment("a", 0, 9), segment("b", 10, 19), segment("c", 0, 19, epoch=2)]
    assert overlapping(apart) == set()
    assert hidden_points(apart) == []
    shared = [*apart, segment("d", 5, 12), SqlSegment("e", "e", 1, SegmentRange(None, None))]
    assert overlapping(shared) == {"a", "b", "d"}
    assert hidden_points(shared) == [HiddenPoints("d", 50, 90), HiddenPoints("b", 100, 120)]


def test_a_window_reads_its_own_segments_alone(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    history = tmp_path / "history"
    kept(history, lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    Archiver(history, archive).archive_all()
    segments = closed_of(history, lab)
    window = TimeRange(segments[1].from_ns + 1, segments[2].to_ns - 1)
    here = ask(
        f"SELECT * EXCLUDE (time) FROM events WHERE at_ns BETWEEN {window.since_ns} AND {window.until_ns} ORDER BY ALL",
        SqlSource(history),
    )
    read: set[str] = set()
    really = Archive.read

    def noted(reading: Archive, path: str, start: int, end: int) -> bytes:
        read.add(path)
        return really(reading, path, start, end)

    monkeypatch.setattr(Archive, "read", noted)
    assert ask(QUERIES[0], SqlSource(None, archive=archive.url, window=window)) == here
    named = {segment.path.name for segment in segments if segment.from_ns <= window.until_ns}
    named -= {segment.path.name for segment in segments if segment.to_ns < window.since_ns}
    assert {path.split("/")[3][: len(next(iter(named)))] for path in read} == named
    assert {path.rpartition("/")[2] for path in read} == {"events.parquet"}  # the query names no other table
    assert len(named) < len(segments)
    far = TimeRange(segments[-1].to_ns + 10**15, segments[-1].to_ns + 2 * 10**15)
    with pytest.raises(BadQuery, match="none of that time"):
        ask("FROM events", SqlSource(None, archive=archive.url, window=far))


def test_retention_keeps_what_is_not_archived_unless_the_disk_is_full(
    tmp_path: Path, lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    history = tmp_path / "history"
    closed = kept(history, lab)
    blocked = tmp_path / "archive"
    archiver = Archiver(history, Archive(str(blocked), make=True))
    keeper = Keeper(history, Keep(days=1), archiver)
    late_ns = closed_of(history, lab)[-1].to_ns + 2 * 86_400 * 10**9
    keeper.drop(late_ns)
    assert [segment.path for segment in closed_of(history, lab)] == closed
    archiver.archive_all()
    for path in closed[2:]:
        (path / archiver_module.MARKER_FILE).unlink()
    again = keeper.archiver = Archiver(history, Archive(str(blocked)))
    keeper.drop(late_ns)
    assert [segment.path for segment in closed_of(history, lab)] == closed[2:]
    assert again.problem() == ""
    keeper.keep_no_more_than = Keep(days=1, bytes=sum(size(path) for path in closed[3:]) + open_bytes(history))
    keeper.drop(late_ns)
    assert [segment.path for segment in closed_of(history, lab)] == closed[3:]
    assert again.figures().deleted == 1
    assert "--keep-bytes forced the deletion" in again.problem()
    assert str(closed[2]) in caplog.text
    keeper.stop([])


def size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir())


def open_bytes(history: Path) -> int:
    return sum(path.stat().st_size for path in history.glob("*/*.kvj"))


def test_an_archived_segment_goes_before_an_older_one_that_is_not(tmp_path: Path, lab: Lab) -> None:
    history = tmp_path / "history"
    closed = kept(history, lab)
    archiver = Archiver(history, Archive(str(tmp_path / "archive"), make=True))
    archiver.archive_all()
    (closed[0] / archiver_module.MARKER_FILE).unlink()
    again = Archiver(history, archiver.archive)
    total = sum(map(size, closed)) + open_bytes(history)
    keeper = Keeper(history, Keep(days=100_000, bytes=total - 1), again)
    keeper.drop(time.time_ns())
    assert [segment.path for segment in closed_of(history, lab)] == [closed[0], *closed[2:]]
    assert again.figures().deleted == 0
    keeper.stop([])


def test_an_archive_that_fails_is_reported_and_catches_up(tmp_path: Path, lab: Lab) -> None:
    history, target = tmp_path / "history", tmp_path / "archive"
    closed = kept(history, lab)
    archive = Archive(str(target), make=True)
    target.rmdir()
    target.write_text("no directory")
    archiver = Archiver(history, archive, retry_s=0.05)
    archiver.start()
    try:
        until(lambda: archiver.figures().failures > 1)
        assert archiver.figures().waiting == len(closed)
        assert "do not reach the archive" in archiver.problem()
        target.unlink()
        target.mkdir()
        until(lambda: archiver.figures().waiting == 0 and archiver.figures().segments == len(closed))
        assert archiver.problem() == ""
    finally:
        archiver.stop()


def test_a_segment_that_waits_too_long_is_behind(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path / "history", lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    now_s = time.time()
    archiver = Archiver(tmp_path / "history", archive, wall_s=lambda: now_s)
    with monkeypatch.context() as slow:
        slow.setattr(archive, "has", lambda _path: archiver._thread.ask_to_stop())  # ends after the first segment
        archiver.archive_all()
    assert archiver.figures().waiting > 0
    assert archiver.problem() == ""
    now_s += archiver_module.ARCHIVE_BEHIND_S + 60
    assert "is behind" in archiver.problem()


def test_a_damaged_segment_holds_up_no_other(tmp_path: Path, lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    closed = kept(tmp_path / "history", lab)
    (closed[0] / "frames.parquet").write_bytes(b"no Parquet")
    (closed[1] / "points.parquet").unlink()
    archiver = Archiver(tmp_path / "history", Archive(str(tmp_path / "archive"), make=True))
    archiver.archive_all()
    assert archiver.figures().segments == len(closed) - 2
    assert caplog.text.count("is not archived") == 2


def test_a_damaged_archive_is_named(tmp_path: Path, lab: Lab) -> None:
    kept(tmp_path / "history", lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    Archiver(tmp_path / "history", archive).archive_all()
    of = SqlSource(None, archive=archive.url)
    events = sorted((tmp_path / "archive").glob("segments/*/*/*/events.parquet"))[0]
    whole = events.read_bytes()
    events.write_bytes(whole[:-100])
    with pytest.raises(BadQuery, match="the archive cannot be read"):
        ask("SELECT count(*) FROM events WHERE request = 1", of)
    events.unlink()
    with pytest.raises(BadQuery, match="the archive cannot be read"):
        ask("SELECT count(*) FROM events WHERE request = 1", of)
    events.write_bytes(whole)
    manifest = sorted((tmp_path / "archive").glob("manifests/*/*/*.json"))[0]
    text = manifest.read_text()
    for damaged, says in (
        ("{", "is damaged"),
        (text.replace('"format":1', '"format":2'), "upgrade"),
        (text.replace('"path":"segments/', '"path":"../'), "another segment"),
        (" " * 70_000, "more than 65,536 bytes"),
    ):
        manifest.write_text(damaged)
        with pytest.raises(BadQuery, match=says):
            ask("FROM events", of)


def test_an_engine_without_a_stream_is_archived_too(tmp_path: Path) -> None:
    """Its segments hold samples, and neither batches nor points."""
    kept_in(tmp_path / "history", until=200)
    archive = Archive(str(tmp_path / "archive"), make=True)
    archiver = Archiver(tmp_path / "history", archive)
    archiver.archive_all()
    assert archiver.figures().segments == 2
    for table in ("events", "points"):
        assert ask(f"FROM {table}", SqlSource(None, archive=archive.url)) == []
    manifest, _ = archive.manifests(list(archive.segments(*ALWAYS)))
    assert (manifest.sequences, manifest.points_ns) == (None, None)
    assert sum(file.rows for file in manifest.files) > 50


def test_a_segment_that_is_deleted_meanwhile_is_not_left_out(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention deletes it after it was found on disk, where the archive's copy was passed over."""
    closed = kept(tmp_path / "history", lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    Archiver(tmp_path / "history", archive).archive_all()
    found = archive.segments

    def deleted(*window: int) -> Any:
        shutil.rmtree(closed[0])
        return found(*window)

    of = SqlSource(tmp_path / "history", archive=archive.url)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Archive, "segments", lambda _archive, *window: deleted(*window))
        with pytest.raises(BadQuery, match="was deleted while the query began"):
            ask(QUERIES[0], of)
    assert ask(QUERIES[0], of)


def test_the_command_reads_an_archive_alone(tmp_path: Path, lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    kept(tmp_path / "history", lab)
    Archiver(tmp_path / "history", Archive(str(tmp_path / "archive"), make=True)).archive_all()
    query = ["sql", "SELECT count(*) AS n FROM requests", "--format", "json"]
    assert main([*query, "--archive", f"file://{tmp_path}/archive"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["n"] > 10
    assert main([*query, "--archive", str(tmp_path / "archive"), "--since", "30m"]) == 2
    assert "none of that time" in capsys.readouterr().err
    for arguments, says in (
        (["--archive", str(tmp_path / "nowhere")], "is not an archive: `monitor serve --archive"),
        (["--archive", "ftp://x/y"], "is not an archive: name s3://"),
        (["--archive", "s3://key:secret@bucket/x"], "AWS_ACCESS_KEY_ID"),
    ):
        assert main([*query, *arguments]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "nowhere").exists()
    assert main(["sql", "FROM events", str(tmp_path), "--archive", str(tmp_path / "archive")]) == 2
    assert "not both" in capsys.readouterr().err


def test_a_bucket_of_another_server_is_another_archive(
    tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path / "history", lab)
    (segment, *_) = closed_of(tmp_path / "history", lab)
    url = s3("http://127.0.0.1:9", monkeypatch)
    archive = Archive(url)
    archiver_module.write_marker(segment.path, archiver_module.ArchiveMarker(archive.place, "its manifest"))
    assert Archiver(tmp_path / "history", Archive(url)).has(segment)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:10")
    assert not Archiver(tmp_path / "history", Archive(url)).has(segment)


def test_a_server_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(BadQuery, match=rf"cannot be read: {url}"):
        ask("FROM events", SqlSource(None, archive=url))
    with pytest.raises(BadTarget):
        Archive("s3://")


def test_a_query_of_an_archive_ends_in_time(tmp_path: Path, lab: Lab) -> None:
    kept(tmp_path / "history", lab)
    archive = Archive(str(tmp_path / "archive"), make=True)
    Archiver(tmp_path / "history", archive).archive_all()
    endless = "SELECT count(*) FROM events a, events b, events c, events d WHERE a.at_ns + b.at_ns > c.at_ns + d.at_ns"
    began_s = time.monotonic()
    with pytest.raises(BadQuery, match=r"stopped after 3 s"):
        asked(endless, SqlSource(None, archive.url), SqlBounds(3.0))
    assert time.monotonic() - began_s < 20


def test_threads_share_a_file_of_an_archive(tmp_path: Path) -> None:
    """Two of DuckDB's seek in one file before either reads."""
    content = random.Random(3).randbytes(5 << 20)
    (tmp_path / "file").write_bytes(content)
    files = ArchiveFiles(Archive(str(tmp_path)), {"file": len(content)})
    both_sought = threading.Barrier(2)
    found: dict[int, bytes] = {}
    with files.open(f"{PROTOCOL}://file") as file:

        def read(at: int) -> None:
            file.seek(at)
            both_sought.wait(10)
            found[at] = file.read(3 << 20)

        threads = [threading.Thread(target=read, args=(at,)) for at in (1, 2_000_000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.seek(0)
        assert file.read() == content
    assert found == {at: content[at : at + (3 << 20)] for at in (1, 2_000_000)}
