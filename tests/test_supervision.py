"""A part of the service that fails is contained, counted, reported and forgotten once it works; a late loop is seen."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kvscope.dashboards.web import header
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base import limits
from kvscope.monitor.base.supervision import LATE_FACTOR, SupervisedThread, Supervisor
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.detectors.detector import Detector
from kvscope.monitor.detectors.registry import DETECTORS
from kvscope.monitor.questions.engines import engine_view
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.loop_watchdog import LoopWatchdog, notify_systemd
from tests.waiting import PATIENCE_S

ENGINE = "lab@127.0.0.1:0/0"
OTHER = "other@127.0.0.1:0/0"


def followed(*engines: str) -> tuple[Pipeline, Callable[[], None]]:
    """Engines that are followed, and what lets them live on for a while."""
    pipeline = Pipeline()
    labs = [Lab(total=64, engine=engine) for engine in engines]

    def live_on() -> None:
        for lab in labs:
            for _ in range(30):
                lab.step(0.5)
                pipeline.feed([*lab.frames, lab.heartbeat()])
                lab.frames.clear()

    live_on()
    return pipeline, live_on


def failing(pipeline: Pipeline, engine: str = ENGINE) -> list[str]:
    found = [found for found in pipeline.findings("firing") if found.code == "blind.reader-failed"]
    return [found.id for found in found if found.engine == engine]


def test_a_reader_that_failed_is_a_finding_of_its_engines_until_it_works() -> None:
    pipeline, live_on = followed(ENGINE, OTHER)
    pipeline.report_failure("reader tcp://here", "reader", ZeroDivisionError("division by zero"), [ENGINE])
    assert len(failing(pipeline)) == 1
    assert not failing(pipeline, OTHER)
    ledgers = pipeline.fleet.engines
    assert engine_view(ledgers[ENGINE], ()).status == "unknown"
    assert "not read now" in str(header.health(engine_view(ledgers[ENGINE], ()), 0.0))
    assert "exact" not in str(header.health(engine_view(ledgers[ENGINE], ()), 0.0))
    assert "'exact'" in str(header.health(engine_view(ledgers[OTHER], ()), 0.0))
    assert engine_view(ledgers[OTHER], ()).status != "unknown"
    page = TestClient(create_app(pipeline, list), base_url="http://127.0.0.1").get("/metrics").text
    assert 'kvscope_worker_failing{kind="reader",worker="reader tcp://here"} 1.0' in page
    assert f'kvscope_ledger_exact{{engine="{ENGINE}"}} 0.0' in page
    assert f'kvscope_ledger_exact{{engine="{OTHER}"}} 1.0' in page
    pipeline.report_recovery("reader tcp://here")
    live_on()
    assert not failing(pipeline)
    assert engine_view(ledgers[ENGINE], ()).status != "unknown"


def test_a_detector_that_raises_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken: Detector = next(each for each in DETECTORS if each.code == "leak.unaccounted")  # type: ignore[type-arg]

    def detect(*_args: object) -> None:
        raise KeyError("a defect")

    pipeline, live_on = followed(ENGINE)
    monkeypatch.setattr(type(broken), "detect", detect)
    for _ in range(3):
        pipeline.settle()
    assert len(failing(pipeline)) == 1
    assert pipeline.supervisor.totals()[f"the detector leak.unaccounted of {ENGINE}"] == 3
    assert caplog.text.count("a defect") >= 1
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1
    monkeypatch.undo()
    live_on()
    assert not failing(pipeline)


def test_a_loop_that_does_not_turn_is_late_and_fails_the_health_check() -> None:
    now = [100.0]
    pipeline, _ = followed(ENGINE)
    supervisor = pipeline.supervisor = Supervisor(lambda: now[0])
    client = TestClient(create_app(pipeline, list), base_url="http://127.0.0.1")
    supervisor.beat("reader tcp://here", 4.0)
    now[0] += 3.9
    assert not supervisor.late()
    assert not supervisor.is_late("reader tcp://here")
    now[0] += 0.2
    assert list(supervisor.late()) == ["reader tcp://here"]
    assert supervisor.is_late("reader tcp://here")
    assert not supervisor.is_late("a reader that never turned")
    assert client.get("/healthz").status_code == 200
    now[0] += 4.0 * LATE_FACTOR
    answer = client.get("/healthz")
    assert answer.status_code == 503
    assert list(answer.json()["late"]) == ["reader tcp://here"]
    supervisor.beat("reader tcp://here", 4.0)
    assert client.get("/healthz").json()["status"] == "ok"
    now[0] += 1_000
    supervisor.ended("reader tcp://here")
    assert client.get("/healthz").status_code == 200


def test_a_thread_that_was_asked_to_stop_is_not_missed() -> None:
    """A reload asks all removed readers to stop first, and waits for one after the other then."""
    supervisor = Supervisor()
    thread = SupervisedThread("reader", "reader", lambda: 60.0, supervisor, within_s=60)
    thread.start()
    assert supervisor.health() == (1, 1, [])
    thread.ask_to_stop()
    thread.join()
    supervisor.check()
    assert supervisor.health() == (0, 0, [])
    thread.stop()


def test_an_engine_that_no_source_has_leaves_the_ledger_in_time() -> None:
    pipeline, _ = followed(ENGINE)
    page_engine = "m@127.0.0.1:8000/0"
    pipeline.feed([Sample(page_engine, "scrape 1", at_ns=1_700_000_000_000_000_000, running=1, source="metrics")])
    now = [0.0]
    watchdog = LoopWatchdog(pipeline, [], lambda: None, lambda: now[0])
    watchdog.look()
    now[0] = limits.GONE_S - 1
    watchdog.look()
    assert set(pipeline.fleet.engines) == {ENGINE, page_engine}
    now[0] = limits.GONE_S + 1
    watchdog.look()
    assert set(pipeline.fleet.engines) == {ENGINE}
    now[0] = limits.GONE_STREAM_S + 1
    watchdog.look()
    assert not pipeline.fleet.engines
    assert not pipeline.findings("firing")
    assert [engine.engine for engine in pipeline.engines()] == []


def test_systemd_is_notified_while_the_loops_turn_and_not_when_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """READY=1 once, WATCHDOG=1 again and again, and nothing from when a loop is late until it turns again."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", address)

        def received() -> list[bytes]:
            messages = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    messages.append(systemd.recv(100))
            return messages

        pipeline = Pipeline()
        now_s = [0.0]
        pipeline.supervisor = Supervisor(lambda: now_s[0])
        watchdog = LoopWatchdog(pipeline, [], lambda: None)
        pipeline.supervisor.beat("reader", 4.0)
        watchdog.look()
        now_s[0] = 4.0 * LATE_FACTOR
        watchdog.look()
        assert received() == [b"WATCHDOG=1"] * 2
        now_s[0] += 0.1
        watchdog.look()
        assert received() == []
        pipeline.supervisor.beat("reader", 4.0)
        watchdog.look()
        assert received() == [b"WATCHDOG=1"]
        watchdog.start()
        deadline = time.monotonic() + PATIENCE_S
        messages: list[bytes] = []
        while messages.count(b"WATCHDOG=1") < 2:
            assert time.monotonic() < deadline
            messages += received()
            time.sleep(0.02)
        watchdog.stop()
        assert messages[0] == b"READY=1"
        assert messages.count(b"READY=1") == 1


def test_systemd_in_the_abstract_namespace_and_without_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"kvscope-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify_systemd("WATCHDOG=1")
        assert systemd.recv(100) == b"WATCHDOG=1"
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}-that-is-not-there")
        notify_systemd("WATCHDOG=1")
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify_systemd("WATCHDOG=1")
        with pytest.raises(BlockingIOError):
            systemd.recv(100)
