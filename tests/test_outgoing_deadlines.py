"""Each part that asks a server over HTTP, against one whose header never ends: it gives up at its deadline."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvscope.monitor.base.bounded_http import BoundedClient, HttpTimeout
from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.base.http_url import http_url
from kvscope.monitor.outputs.alerting import alerting
from kvscope.monitor.outputs.alerting.message import Message, alerted_finding
from kvscope.monitor.outputs.alerting.receivers import receiver_of
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.sources.kv_event_stream import discover_kv_endpoints
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.sources.prometheus_history import PrometheusHistory
from kvscope.monitor.sources.source import SourceOptions
from kvscope.monitor.terminal.commands import alerts
from kvscope.monitor.terminal.commands.alerts import AlertsClient
from tests.finding_transitions import leak
from tests.test_bounded_http import OK, server, trickle

DEADLINE_S = 0.5
HEADER_WITHOUT_END = b"HTTP/1.1 200 OK\r\nX-Slow: "


def ask_page(url: str) -> None:
    page = MetricsPage(url, timeout_s=DEADLINE_S)
    try:
        page.scrape()
    finally:
        page.close()


def ask_prometheus(url: str) -> None:
    PrometheusHistory(url, SourceOptions(timeout_s=DEADLINE_S)).poll()


def ask_where_kv_events_are(url: str) -> None:
    discover_kv_endpoints(url, DEADLINE_S)


def ask_service(url: str) -> None:
    client = ServiceClient(url, timeout_s=DEADLINE_S)
    try:
        client.engines()
    finally:
        client.close()


def ask_alerts(url: str) -> None:
    AlertsClient(url).view()


ASKING: dict[str, Callable[[str], None]] = {
    "a metrics page": ask_page,
    "Prometheus": ask_prometheus,
    "where KV events are": ask_where_kv_events_are,
    "a service": ask_service,
    "a service's alerts": ask_alerts,
}


@pytest.mark.parametrize("who", ASKING)
def test_a_header_that_trickles_is_left_at_the_deadline(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server goes on for 15 s, and each of its bytes comes well within the timeout of a read."""
    monkeypatch.setattr(alerts, "ALERTS_TIMEOUT_S", DEADLINE_S)
    with server(trickle(HEADER_WITHOUT_END)) as url:
        began = time.monotonic()
        with pytest.raises(KvscopeError):
            ASKING[who](url)
        assert time.monotonic() - began < 10


def test_a_delivery_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerting, "SEND_TIMEOUT_S", DEADLINE_S)
    finding = leak()[0].finding
    message = Message("msg_1", "firing", "", alerted_finding(finding.report(), finding.id, "", "firing"))
    with server(trickle(HEADER_WITHOUT_END)) as url, alerting.client(allow_private=True) as client:
        began = time.monotonic()
        answer = alerting.send(client, receiver_of(url, allow_private=True), message)
        assert answer.text == "127.0.0.1 did not answer within 0.5 s"
        assert time.monotonic() - began < 10


def test_a_request_may_have_a_longer_deadline_than_its_client() -> None:
    """As a service's question does that replays long windows."""

    def serve(connection: socket.socket) -> None:
        time.sleep(1.0)
        connection.sendall(OK + b"Content-Length: 5\r\n\r\nhello")

    with server(serve) as url, BoundedClient(0.2) as client:
        with pytest.raises(HttpTimeout):
            client.ask("GET", http_url(url))
        assert client.ask("GET", http_url(url), deadline_s=20.0).body == b"hello"


def test_nothing_asks_a_server_without_the_bounded_client() -> None:
    """Every outgoing request of the monitor goes through kvscope.monitor.base.bounded_http."""
    root = Path(__file__).parents[1]
    http_client = re.compile(
        r"^\s*(?:import|from) (?:httpx2?|httpcore2?|requests|urllib3|urllib\.request|http\.client|aiohttp)", re.M
    )
    found = {
        str(path.relative_to(root))
        for folder in ("monitor", "dashboards")
        for path in (root / folder).rglob("*.py")
        if http_client.search(path.read_text())
    }
    assert found == {"monitor/base/bounded_http.py"}
