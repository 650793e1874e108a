"""A service whose archive or remote store fails says so on /healthz, /metrics and in its log, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kvscope.monitor.cli import main
from kvscope.monitor.exporters.remote_write.remote_writer import RemoteWriteConfig
from kvscope.monitor.service.data_directory import ARCHIVE_WORKER, REMOTE_WRITE_WORKER, DataDirectoryCheck
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.service import Service, ServiceConfig
from tests.history.archived import kept
from tests.history.recorded import worked
from tests.receiving import Server, until

pytestmark = pytest.mark.usefixtures("archive_runtime")


def test_copies_that_fail_are_shown_until_they_catch_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lab = worked(200)
    kept(tmp_path / "data" / "history", lab)
    store = Server(check=lambda got: 503)
    target = tmp_path / "archive"
    config = ServiceConfig(
        data=tmp_path / "data",
        archive=str(target),
        remote_write=RemoteWriteConfig(store.url, spool_every_s=0.05, retry_s=0.05),
    )
    service = Service(config)
    assert service.keeper is not None
    assert service.keeper.archiver is not None
    service.keeper.archiver._retry_s = 0.05
    target.rmdir()
    target.write_text("no directory")
    check = DataDirectoryCheck(service.watch, service.keeper, None, service.remote_write)
    client = TestClient(create_app(service.watch, service.sources, collector=service.collector), "http://127.0.0.1")

    def shown() -> dict[str, object]:
        check.check()
        health: dict[str, object] = client.get("/healthz").json()
        return health

    assert shown() == {"status": "ok"}
    service.start()
    try:
        service.watch.feed(lab.frames)
        until(lambda: shown() == {"status": "ok", "behind": sorted((ARCHIVE_WORKER, REMOTE_WRITE_WORKER))})
        page = client.get("/metrics").text
        assert f'kvscope_worker_failing{{kind="copy",worker="{ARCHIVE_WORKER}"}} 1.0' in page
        assert value(page, "kvscope_archive_waiting_segments") > 0
        assert value(page, "kvscope_archive_failures_total") > 0
        assert value(page, "kvscope_remote_write_spool_bytes") > 0
        assert caplog.text.count("segments do not reach the archive") == 1
        target.unlink()
        target.mkdir()
        store.check = lambda got: 204
        until(lambda: shown() == {"status": "ok"})
        until(lambda: value(client.get("/metrics").text, "kvscope_archive_waiting_segments") == 0)
        page = client.get("/metrics").text
        assert value(page, "kvscope_archive_segments_total") > 3
        assert value(page, 'kvscope_remote_write_points_total{outcome="sent"}') > 10
    finally:
        service.stop()
        store.stop()
        client.close()


def value(page: str, series: str) -> float:
    (line,) = (line for line in page.splitlines() if line.startswith(f"{series} "))
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("flag", ["--archive", "--remote-write"])
def test_copies_are_of_data_that_is_kept(
    flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSCOPE_DATA", raising=False)
    assert main(["serve", flag, "http://127.0.0.1:1"]) == 2
    assert "copy what --data DIR keeps" in capsys.readouterr().err
