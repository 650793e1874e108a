"""Discoveries of a service: targets come and go, lists flap and fail, and a reload changes them."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.base import limits
from kvscope.monitor.service.discoveries import Discoveries, Discovery
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.discovery_config import discovery_of
from tests.service.test_reload import service, targets, written
from tests.sources.test_finders import answering
from tests.test_service import process
from tests.test_source_set import running
from tests.waiting import until

A, B = "http://a.test:1/metrics", "http://b.test:2/metrics"


class Listed:
    """A service that does not run, a file of targets, and the time."""

    def __init__(self, path: Path) -> None:
        self.path = path / "targets.json"
        self.service = Service(ServiceConfig())
        self.now_s = 0.0
        self.discovery = Discovery(
            discovery_of("file_sd", {"files": [str(self.path)], "gone_after": "2m"}),
            self.service.readers,
            self.service.readers.engines,
            self.service.watch,
            lambda: self.now_s,
        )

    def look(self, *addresses: str) -> None:
        self.path.write_text(json.dumps([{"targets": list(addresses)}]))
        self.discovery.look()

    def read(self) -> list[str]:
        return [reader.target for reader in self.service.readers]


@pytest.fixture
def listed(tmp_path: Path) -> Iterator[Listed]:
    each = Listed(tmp_path)
    yield each
    each.service.stop()


def test_a_target_that_left_is_read_for_a_while(listed: Listed) -> None:
    listed.look("a.test:1", "b.test:2")
    assert listed.read() == [A, B]
    listed.now_s = 10
    listed.look("a.test:1")
    listed.now_s = 129
    listed.look("a.test:1")
    assert listed.read() == [A, B]
    assert (listed.discovery.view.targets, listed.discovery.view.leaving) == (1, 1)
    listed.now_s = 130
    listed.look("a.test:1")
    assert listed.read() == [A]
    assert (listed.discovery.view.targets, listed.discovery.view.leaving) == (1, 0)


def test_a_list_that_flaps_changes_nothing(listed: Listed) -> None:
    listed.look("a.test:1", "b.test:2")
    before = list(listed.service.readers)
    for at_s in range(0, 1000, 50):
        listed.now_s = at_s
        listed.look(*(["a.test:1"] if at_s % 100 else ["a.test:1", "b.test:2"]))
    assert list(listed.service.readers) == before


def test_a_list_that_fails_keeps_the_last_one_and_is_blind(listed: Listed) -> None:
    listed.look("a.test:1", "b.test:2")
    listed.now_s = 10
    listed.path.write_text("[")
    for _ in range(3):
        listed.now_s += 1000
        listed.discovery.look()
    view = listed.discovery.view
    assert (view.is_blind, view.targets) == (True, 2)
    assert "is no JSON" in view.error
    assert listed.read() == [A, B]
    (failure,) = listed.service.watch.supervisor.failures()
    assert (failure.kind, failure.worker) == ("discovery", f"the discovery file_sd {listed.path}")
    listed.look("a.test:1")  # its time begins now: nothing was known before
    assert listed.read() == [A, B]
    assert not listed.discovery.view.is_blind
    assert listed.service.watch.supervisor.failures() == ()


def test_targets_that_cannot_be_read_are_reported_and_the_others_are_read(
    listed: Listed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SOURCES", 2)
    other = discovery_of("file_sd", {"files": [str(listed.path.with_name("other.json"))]})
    listed.look("a.test:1", "not-an-address")
    assert listed.read() == [A]
    assert not listed.discovery.view.is_blind
    assert "'not-an-address' is no HOST:PORT" in listed.discovery.view.error
    listed.path.with_name("other.json").write_text('[{"targets": ["b.test:2", "c.test:3"]}]')
    second = Discovery(other, listed.service.readers, listed.service.readers.engines, listed.service.watch)
    second.look()
    assert listed.read() == [A, B]
    (refused,) = (view for view in listed.service.sources() if view.target == "http://c.test:3/metrics")
    assert refused.error.startswith("the service reads 2 sources")


def test_a_target_of_the_configuration_stays_when_a_list_loses_it(listed: Listed) -> None:
    config = discovery_of("file_sd", {"files": [str(listed.path)]})
    each = Service(ServiceConfig(metrics=(A,)))
    listed.look("a.test:1", "b.test:2")
    discoveries = Discoveries(each.readers, each.readers.engines, each.watch, [config])
    discoveries.start()
    until(lambda: [view.target for view in each.sources()] == [A, B], "both")
    discoveries.replace([])
    assert [view.target for view in each.sources()] == [A]
    each.stop()


@pytest.mark.slow
def test_an_engine_that_dies_and_leaves_its_list_is_found_dead_before_it_is_removed(tmp_path: Path) -> None:
    events = f"ipc://{tmp_path}/events"
    file = tmp_path / "targets.json"
    file.write_text(json.dumps([{"targets": ["engine"], "labels": {"kvscope_events": events}}]))
    config = ServiceConfig(discovery=(discovery_of("file_sd", {"files": [str(file)]}),))
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "4") as engine, running(config) as each:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        until(lambda: any(view.running for view in each.watch.engines()), "an engine at work")
        engine.kill()
        file.write_text("[]")
        until(lambda: "stuck.engine-stalled" in {found.code for found in each.watch.findings("firing")}, "its death")
        assert [view.target for view in each.sources()] == [events]
        assert each.discoveries.views()[0].leaving == 1


@pytest.mark.slow
def test_an_agent_follows_a_file_and_a_server_and_a_reload(tmp_path: Path) -> None:
    """A real process, with real pages: one in the file, one on the server's list."""
    path, file = tmp_path / "agent.toml", tmp_path / "targets.json"
    fails = threading.Event()
    body = page(rows("never-freed")[30])
    with served(body) as one, served(body) as other:
        address = [url.removeprefix("http://").removesuffix("/metrics") for url in (one.url, other.url)]

        def answer(_path: str, _headers: dict[str, str]) -> tuple[int, bytes]:
            return (503, b"") if fails.is_set() else (200, json.dumps([{"targets": address[1:]}]).encode())

        file.write_text("[]")
        with answering(answer) as url:
            by_server = ["[[http_sd]]", f'url = "{url}/list"', 'refresh = "1s"', 'gone_after = "1s"']
            by_file = ["[[file_sd]]", f'files = ["{file}"]', 'gone_after = "1s"']
            written(path, *by_server, *by_file)
            with service("agent", path) as (started, client):
                until(lambda: targets(client) == [other.url], "the server's target")
                file.write_text(json.dumps([{"targets": address[:1]}]))
                until(lambda: targets(client) == sorted([one.url, other.url]), "the file's target")
                until(lambda: len(client.get("/api/engines").json()) == 2, "their engines")

                fails.set()
                until(lambda: any(each["is_blind"] for each in client.get("/api/discoveries").json()), "blind")
                figures = client.get("/metrics").text
                assert f'kvscope_discovery_blind{{discovery="http_sd {url}/list"}} 1.0' in figures
                assert f'kvscope_discovery_blind{{discovery="file_sd {file}"}} 0.0' in figures
                assert 'kvscope_source_changes_total{change="added"} 2.0' in figures
                until(lambda: "blind.reader-failed" in client.get("/api/findings").text, "a finding")
                (blind,) = [
                    each for each in client.get("/api/findings").json() if each["code"] == "blind.reader-failed"
                ]
                assert "Engines that came since are not watched" in blind["explanation"]
                assert targets(client) == sorted([one.url, other.url])

                file.write_text("[]")
                until(lambda: targets(client) == [other.url], "the file's target is gone")
                written(path, *by_file)
                started.send_signal(signal.SIGHUP)
                until(lambda: targets(client) == [], "the discovery is gone")
                removed = {"change": "removed", "target": other.url, "origin": f"http_sd {url}/list"}
                until(lambda: client.get("/api/source-changes").json()[0].items() >= removed.items(), "it is reported")
                started.send_signal(signal.SIGTERM)
                assert started.wait(30) == 0
