"""Remote write: every point arrives once with its own time, outages and restarts lose none, and losses are shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.exporters.remote_write import remote_writer
from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriteConfig, RemoteWriter
from kvscope.monitor.exporters.remote_write.spool import Spool
from kvscope.monitor.exporters.remote_write.write_request import SERIES_OF_POINT, _value, _WriteRequest
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.pipeline import Pipeline
from tests.dashboards.programs import free_port, program, running
from tests.history.recorded import worked
from tests.lab import Lab
from tests.receiving import Got, Server, until


@pytest.fixture(scope="module")
def lab() -> Lab:
    return worked(300, seed=3)


def fed(lab: Lab, first: int = 0, last: int = 1 << 30, watch: Pipeline | None = None) -> Pipeline:
    watch = watch or Pipeline()
    watch.feed(lab.frames[first:last])
    return watch


def points_of(watch: Pipeline) -> list[Point]:
    (ledger,) = watch.fleet.engines.values()
    return list(ledger.points)


@contextmanager
def writing(url: str, watch: Pipeline, directory: Path, **settings: Any) -> Iterator[RemoteWriter]:
    config = RemoteWriteConfig(url, **{"spool_every_s": 0.05, "retry_s": 0.05, **settings})
    writer = RemoteWriter(config, watch, directory)
    writer.start()
    try:
        yield writer
    finally:
        writer.stop()


def samples(got: list[Got], column: str) -> list[tuple[int, float]]:
    """Times in ms and values of a series, as requests brought them."""
    found = []
    for each in got:
        request = _WriteRequest()
        body = each.body.encode(errors="surrogateescape")
        request.ParseFromString(pa.decompress(body, decompressed_size=uncompressed(body), codec="snappy", asbytes=True))
        for series in request.timeseries:
            labels = [(label.name, label.value) for label in series.labels]
            assert labels == sorted(labels)
            if dict(labels)["__name__"] == f"kvscope_point_{column}":
                found += [(sample.timestamp, sample.value) for sample in series.samples]
    return found


def uncompressed(body: bytes) -> int:
    """The length that a snappy block begins with: a varint."""
    length = shift = 0
    for byte in body:
        length |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return length


def test_points_arrive_in_victoria_metrics(tmp_path: Path, lab: Lab) -> None:
    binary = program("victoria-metrics", "victoria-metrics")
    port = free_port()
    command = [
        binary,
        f"-storageDataPath={tmp_path / 'store'}",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-retentionPeriod=100y",  # the lab's times are in 2023
        "-search.latencyOffset=0s",
    ]
    watch = Pipeline()
    url = f"http://127.0.0.1:{port}"
    with running(command, tmp_path / "log"):
        until(lambda: answers(f"{url}/health"))
        sent = 0
        for first in (0, 150):  # a service, and the next with the same data directory
            fed(lab, first, first + 150, watch)
            new, sent = len(points_of(watch)) - sent, len(points_of(watch))
            with writing(f"{url}/api/v1/write", watch, tmp_path / "spool") as writer:
                until(lambda writer=writer, new=new: writer.figures().sent == new)
                assert writer.problem() == ""
        httpx.get(f"{url}/internal/force_flush")
        text = httpx.get(f"{url}/api/v1/export", params={"match[]": '{__name__=~"kvscope_point_.+"}'}).text
    found = {}
    for line in text.splitlines():
        series = json.loads(line)
        name = series["metric"]["__name__"].removeprefix("kvscope_point_")
        assert series["metric"]["engine"] == lab.packer.engine
        found[name] = list(zip(series["timestamps"], series["values"], strict=True))
    kept = points_of(watch)
    assert len(kept) > 20
    for column in SERIES_OF_POINT:
        values = [(point.at_ns // 1_000_000, _value(point, column)) for point in kept if _value(point, column) != -1]
        assert found.get(column, []) == values, column
    assert len(found) >= len(SERIES_OF_POINT) - 1


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


def test_what_a_store_misses_waits_on_disk(tmp_path: Path, lab: Lab) -> None:
    """The store fails, the service ends, the next one sends all of it in order, and only then is it well."""
    watch = fed(lab, last=150)
    server = Server(check=lambda got: 503)
    try:
        with writing(f"{server.url}?key=secret", watch, tmp_path, token="a-token") as writer:
            until(lambda: writer.figures().failures > 2)
            assert "are sent again: 503 Service Unavailable" in writer.problem()
            assert "secret" not in writer.problem()
            assert writer.figures().waiting_bytes > 0
        assert server.got[0].headers["authorization"] == "Bearer a-token"
        assert server.got[0].headers["content-encoding"] == "snappy"
        server.got.clear()
        server.check = lambda got: 204
        fed(lab, 150, watch=watch)
        with writing(server.url, watch, tmp_path) as writer:
            until(lambda: writer.figures().sent == len(points_of(watch)))
            until(lambda: writer.problem() == "")
        expected = [(point.at_ns // 1_000_000, point.running) for point in points_of(watch)]
        assert samples(server.taken, "running") == expected
    finally:
        server.stop()


def test_a_request_that_is_refused_is_counted_and_holds_up_no_other(tmp_path: Path, lab: Lab) -> None:
    """400 is about the content. 401 and 404 are about us: nothing is dropped for them."""
    watch = fed(lab, last=100)
    first = len(points_of(watch))
    server = Server((401, {}), (404, {}), (400, {}), check=lambda got: 204)
    try:
        with writing(server.url, watch, tmp_path) as writer:
            until(lambda: writer.figures().rejected)
            fed(lab, 100, 200, watch)
            until(lambda: writer.figures().sent)
            figures = writer.figures()
            assert (figures.rejected, figures.failures, figures.dropped) == (first, 2, 0)
            assert figures.sent == len(points_of(watch)) - first
            assert "were lost" in writer.problem()
    finally:
        server.stop()


def test_a_full_spool_drops_the_oldest_and_says_so(tmp_path: Path, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_writer, "POINTS_A_REQUEST", 5)
    watch = fed(lab)
    config = RemoteWriteConfig("http://127.0.0.1:9/", spool_bytes=2_000)
    writer = RemoteWriter(config, watch, tmp_path)
    writer.spool()
    figures = writer.figures()
    assert 0 < figures.waiting_bytes <= 2_000
    waiting = sum(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("*.snappy"))
    assert figures.dropped + waiting == len(points_of(watch))
    assert "were lost: the spool was full" in writer.problem()
    writer.stop()


def test_a_spool_is_taken_up_in_order_and_half_a_file_is_none(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for body in (b"a", b"b", b"c"):
        assert spool.append(body, 1, 5) == 0
    (tmp_path / ".00000000000000000003-00000000000000000005-000000001.snappy.new").write_bytes(b"half")
    again = Spool(tmp_path)
    bodies = []
    while (request := again.oldest()) is not None:
        bodies.append(request.path.read_bytes())
        again.remove(request)
    assert bodies == [b"a", b"b", b"c"]
    assert list(tmp_path.iterdir()) == []


def test_engines_share_requests(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each point is in one request, in order, and only the last request is small."""
    monkeypatch.setattr(remote_writer, "POINTS_A_REQUEST", 7)
    points = points_of(fed(lab))[:12]
    new = {"a": points[:3], "b": points, "c": points[:1]}
    requests = list(remote_writer._points_by_request(new))
    assert [sum(map(len, each.values())) for each in requests] == [7, 7, 2]
    assert [list(each) for each in requests] == [["a", "b"], ["b"], ["b", "c"]]
    for engine, expected in new.items():
        assert [point for each in requests for point in each.get(engine, ())] == expected
    assert list(remote_writer._points_by_request({})) == []


@pytest.mark.parametrize("url", ["localhost:8428", "ftp://x/y", "http://", "http://[", ""])
def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(BadTarget, match="--remote-write takes"):
        RemoteWriter(RemoteWriteConfig(url), Pipeline(), tmp_path)
