"""A service whose archive fails says so on /healthz, /metrics and in its log, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.loop_watchdog import report_problems
from kvscope.monitor.service.service import ARCHIVE_WORKER, Service, ServiceConfig
from kvscope.monitor.terminal.cli import main
from tests.history.archived import kept
from tests.history.recorded import worked
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("archive_runtime")


def test_an_archive_that_fails_is_shown_until_it_catches_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lab = worked(200)
    kept(tmp_path / "data" / "history", lab)
    target = tmp_path / "archive"
    service = Service(ServiceConfig(data=tmp_path / "data", archive=str(target)))
    assert service.keeper is not None
    assert service.keeper.archiver is not None
    service.keeper.archiver._retry_s = 0.05
    target.rmdir()
    target.write_text("no directory")
    client = TestClient(create_app(service.watch, service.sources, collector=service.collector), "http://127.0.0.1")

    def shown() -> dict[str, object]:
        report_problems(service.watch, service.parts)
        health: dict[str, object] = client.get("/healthz").json()
        return {key: value for key, value in health.items() if key != "threads"}

    assert shown() == {"status": "ok"}
    service.start()
    try:
        service.watch.feed(lab.frames)
        until(lambda: shown() == {"status": "ok", "behind": [ARCHIVE_WORKER]})
        page = client.get("/metrics").text
        assert f'kvscope_worker_failing{{kind="copy",worker="{ARCHIVE_WORKER}"}} 1.0' in page
        assert value(page, "kvscope_archive_waiting_segments") > 0
        assert value(page, "kvscope_archive_failures_total") > 0
        failed = f"{ARCHIVE_WORKER} failed: segments do not reach the archive"  # the alert about it is logged as well
        assert caplog.text.count(failed) == 1
        target.unlink()
        target.mkdir()
        until(lambda: shown() == {"status": "ok"})
        until(lambda: value(client.get("/metrics").text, "kvscope_archive_waiting_segments") == 0)
        assert value(client.get("/metrics").text, "kvscope_archive_segments_total") > 3
    finally:
        service.stop()
        client.close()


def value(page: str, series: str) -> float:
    (line,) = (line for line in page.splitlines() if line.startswith(f"{series} "))
    return float(line.rpartition(" ")[2])


def test_an_archive_is_of_data_that_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KVSCOPE_DATA", raising=False)
    assert main(["serve", "--archive", "http://127.0.0.1:1"]) == 2
    assert "copies what --data DIR keeps" in capsys.readouterr().err
