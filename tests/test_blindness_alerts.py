"""What is sent and what is not, from the source to a receiver over HTTP: blindness is, a doubt is not."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvscope.lab.recorded_pages import BEGAN_S, At, Row, page, rows, served
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.outputs.prometheus.service_metrics import Exemplars
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.deliveries import Deliveries
from kvscope.monitor.service.http_api import create_app
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.metrics_page import MetricsPage
from tests.receiving import Server
from tests.waiting import until

BLIND = "blind.reader-failed"
Told = dict[str, Any]


@contextmanager
def receiver() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.stop()


def told(server: Server) -> list[Told]:
    return [json.loads(got.body) for got in server.taken]


def grave(server: Server, kind: str = "firing") -> list[tuple[str, str, str]]:
    """Engine, code and key of what was sent."""
    sent = [message["data"] for message in told(server) if message["type"].endswith(kind)]
    return [(each["engine"], each["code"], each["key"]) for each in sent]


# -------------------------------------------------------------------- a doubt


def alerted_by(server: Server, moments: Sequence[Row]) -> list[tuple[str, str]]:
    """What a service that scrapes a page of these figures sends by its default settings, a scrape each at its time."""
    clock, watch = At(BEGAN_S), Pipeline()
    alerts = Alerts(AlertsConfig((server.url,), allow_private=True))
    deliveries = Deliveries(watch, Exemplars(), alerts, None)
    alerts.start()
    with served() as engine, closing(MetricsPage(engine.url, clock=clock)) as source, closing(alerts):
        for row in moments:
            clock.seconds = BEGAN_S + row["t"]
            engine.answer = page(row)
            watch.feed(source.scrape())
            deliveries.deliver()
        until(lambda: not any(each.pending for each in alerts.figures().receivers), "all is sent")
    return [(message["data"]["code"], message["data"]["verdict"]) for message in told(server)]


def test_a_prefill_of_75_s_is_not_sent_and_an_engine_that_stands_still_is() -> None:
    with receiver() as server:
        assert alerted_by(server, rows("long-prefill", 5.0)) == []
    moves, frozen = rows("frozen-engine"), rows("frozen-engine")[9]
    assert frozen["running"]
    still = [{**frozen, "t": frozen["t"] + 5.0 * n} for n in range(1, 20)]
    with receiver() as server:
        assert alerted_by(server, [*moves[:10], *still[:7]]) == []  # shown by then, and not sent
    with receiver() as server:
        assert alerted_by(server, [*moves[:10], *still]) == [("stuck.engine-stalled", "likely")]


# -------------------------------------------------------------------- blindness


@contextmanager
def serving(server: Server, data: Path, **config: Any) -> Iterator[Service]:
    alerts = AlertsConfig((server.url,), allow_private=True, path=data / "alerts.sqlite")
    service = Service(ServiceConfig(alerts=alerts, data=data, **config))
    service.start()
    try:
        yield service
    finally:
        service.stop()


@pytest.mark.slow
def test_a_page_that_fails_and_a_data_directory_that_goes_are_sent_once_and_end(tmp_path: Path) -> None:
    """Two scrapes of a page that answers 500 are a warning of its engine, a directory is one of the service."""
    data, body = tmp_path / "data", page(rows("never-freed")[0])
    with receiver() as server, served(body) as one, served(body) as other:
        with serving(server, data, metrics=(one.url, other.url)) as service:
            until(lambda: len(service.watch.engines()) == 2, "two engines")
            engine = next(view.engine for view in service.watch.engines() if one.url.split("/")[2] in view.engine)
            one.answer = 500
            until(lambda: (engine, BLIND, f"reader {one.url}") in grave(server), "the page is told")
            one.answer = body
            until(lambda: (engine, BLIND, f"reader {one.url}") in grave(server, "resolved"), "its end is told")
            shutil.rmtree(data.rename(tmp_path / "gone"), ignore_errors=True)  # its writer is at work meanwhile
            named = (service.watch.observer, BLIND, "the history in the data directory")
            until(lambda: named in grave(server), "the directory is told")
            per_engine = [each for each in service.watch.findings() if each.engine == engine and each.code == BLIND]
            assert {each.severity for each in per_engine if "data directory" in each.explanation} == {"info"}
            client = TestClient(create_app(service.watch, service.sources), base_url="http://127.0.0.1")
            firing = next(each for each in client.get("/api/findings").json() if each["engine"] == named[0])
            assert firing["severity"] == "warning"
        assert {each[1] for each in grave(server)} == {BLIND}
        assert len(grave(server)) == len(set(grave(server)))


@pytest.mark.slow
def test_one_scrape_that_fails_is_a_gap_that_is_shown_and_not_sent(tmp_path: Path) -> None:
    body = page(rows("never-freed")[0])
    with receiver() as server, served(body) as one, serving(server, tmp_path, metrics=(one.url,)) as service:
        until(service.watch.engines, "the engine")
        one.answer = 500

        def shown() -> list[str]:
            return [each.severity for each in service.watch.findings("firing") if each.code == BLIND]

        until(shown, "it is shown")
        one.answer = body
        assert shown() == ["info"]
        until(lambda: not shown(), "it is over")
        assert grave(server) == []


@pytest.mark.slow
def test_a_source_that_was_never_heard_is_sent_under_its_targets_name_until_it_is(tmp_path: Path) -> None:
    """A stream that nobody publishes and a page that nobody serves; the page's password is not told."""
    with receiver() as server, socket.create_server(("127.0.0.1", 0)) as kept:
        port = kept.getsockname()[1]
        kept.close()
        stream = f"ipc://{tmp_path}/nobody"
        with serving(
            server, tmp_path, events=(stream,), metrics=(f"http://me:a-secret@127.0.0.1:{port}/metrics",)
        ) as service:
            time.sleep(20)
            assert grave(server) == []
            until(lambda: len(grave(server)) == 2, "both are told")
            names = {stream, f"http://127.0.0.1:{port}/metrics"}
            assert {each[0] for each in grave(server)} == names
            assert {each.severity for each in service.watch.findings("firing") if each.engine in names} == {"warning"}
            assert all(not each.in_step and each.error for each in service.sources())
            assert all("a-secret" not in got.body for got in server.got)
