"""Each kind of receiver against one that checks what the real one does; Alertmanager itself, where it is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from standardwebhooks.webhooks import Webhook

from kvscope.monitor.base.http_url import http_url
from kvscope.monitor.detectors.judgement import FindingHarm
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from tests.dashboards.programs import free_port
from tests.finding_transitions import ENGINE, AlertMessages
from tests.receiving import PagerDuty, Server, slack
from tests.waiting import until

KEY = "0123456789abcdef0123456789abcdef"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8G"
HUGE: dict[str, Any] = {
    "explanation": "<b> & more: " + "é<" * 50_000,
    "do_now": ("restart & pray",) * 50,
    "requests": tuple(f"r-{n}-{'&' * 5000}" for n in range(1000)),
    "key": "k" * 100_000,
}


@contextmanager
def sending(*urls: str, secret: str = "", page: str = "") -> Iterator[Alerts]:
    opened_at = http_url(page) if page else None
    alerts = Alerts(AlertsConfig(urls, secret, allow_private=True, schedule=(0, 0.01, 0.01), page=opened_at))
    alerts.start()
    try:
        yield alerts
    finally:
        alerts.close()


@contextmanager
def serving(**how: Any) -> Iterator[Server]:
    server = Server(*how.pop("answers", ()), **how)
    try:
        yield server
    finally:
        server.stop()


def states(alerts: Alerts) -> set[str]:
    until(lambda: alerts.outbox.pending() == 0)
    return {one.state for one in alerts.view().deliveries}


@pytest.mark.parametrize("fields", [{}, HUGE], ids=["usual", "huge"])
def test_pagerduty_opens_an_incident_and_resolves_it(fields: dict[str, Any]) -> None:
    """It is triggered again, at a try that is answered too late or as a reminder, without another incident."""
    events = PagerDuty(KEY)
    engine = "e" * 2000 if fields else ENGINE
    received_alerts = AlertMessages()
    with (
        serving(check=events, answers=((500, {}), (429, {"retry-after": "0"}))) as server,
        sending(f"pagerduty+http://{KEY}@{server.address}") as alerts,
    ):
        found = received_alerts.fire(1, engine=engine, **fields)
        alerts.put(found)
        assert states(alerts) == {"delivered"}
        (payload,) = events.open.values()
        assert (payload["severity"], payload["class"], payload["group"]) == ("error", "leak.finished-held", engine)
        alerts.replay(alerts.view().deliveries[0].number)
        until(lambda: len(server.taken) == 2)
        assert events.opened == [found[0].finding.id]
        alerts.put(received_alerts.end(2, engine))
        assert states(alerts) == {"delivered"}
        assert events.open == {}
        assert [one.delivered for one in alerts.test()] == [True]
        assert events.open == {}
        assert len(events.opened) == 2
    assert KEY not in repr(alerts.receivers[0].url)


def test_pagerduty_with_a_key_of_another_service_gives_up_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Another try cannot change a 400."""
    with (
        serving(check=PagerDuty(KEY[::-1])) as server,
        sending(f"pagerduty+http://{KEY}@{server.address}") as alerts,
    ):
        alerts.put(AlertMessages().fire(1))
        assert states(alerts) == {"given-up"}
        assert len(server.got) == 1
    assert KEY not in caplog.text


@pytest.mark.parametrize("fields", [{}, HUGE], ids=["usual", "huge"])
def test_slack_takes_the_blocks(fields: dict[str, Any]) -> None:
    received_alerts = AlertMessages()
    with serving(check=slack) as server, sending(f"slack+http://{server.address}/services/T0/B0/x") as alerts:
        alerts.put(received_alerts.fire(1, "stuck.engine-stalled"))
        alerts.put(received_alerts.fire(1, **fields))
        alerts.put(received_alerts.end(9))
        assert states(alerts) == {"delivered"}
        assert [one.delivered for one in alerts.test()] == [True]
        stated = [json.loads(got.body) for got in server.got]
    assert "Steps have stopped" in stated[0]["text"]
    assert stated[0]["blocks"][-1]["elements"][0]["text"].startswith("stuck.engine-stalled · critical")
    assert "also firing there: stuck.engine-stalled" in stated[1]["blocks"][-1]["elements"][0]["text"]
    assert "Resolved" in stated[2]["text"]
    for got in server.got:
        assert "<" not in got.body  # what Slack would take for a link or a mention is escaped
    if fields:
        assert "&lt;b&gt; &amp; more" in stated[1]["blocks"][1]["text"]["text"]


@pytest.mark.parametrize("fields", [{}, HUGE], ids=["usual", "huge"])
def test_a_webhook_is_signed_and_below_the_size_that_the_specification_asks_for(fields: dict[str, Any]) -> None:
    with serving() as server, sending(server.url, secret=SECRET) as alerts:
        alerts.put(AlertMessages().fire(1, **fields))
        assert states(alerts) == {"delivered"}
        (got,) = server.got
    assert Webhook(SECRET).verify(got.body, got.headers)["type"] == "kvscope.finding.firing"
    assert len(got.body.encode()) < 20_000


@pytest.mark.parametrize("kind", ["slack", "pagerduty", "alertmanager", ""])
def test_messages_link_to_the_page_that_people_open(kind: str) -> None:
    """To the finding, its engine around that time, and its runbook, below the path of a proxy."""
    page = "https://ops.example/kvscope"
    received_alerts = AlertMessages()
    with serving() as server:
        address = f"{KEY}@{server.address}" if kind == "pagerduty" else server.address
        with sending(f"{kind}+http://{address}" if kind else server.url, page=page) as alerts:
            began = received_alerts.fire(1_700_000_000, since_ns=1_700_000_000 * 10**9)
            alerts.put(began)
            alerts.put(received_alerts.end(1_700_000_100))
            assert states(alerts) == {"delivered"}
        firing, resolved = (got.body for got in server.got)
    engine = f"{page}/engine?engine=a%40127.0.0.1%3A1%2F0&from=2023-11-14T22%3A12%3A20.000Z"
    for link in (f"{page}/finding?id={began[0].finding.id}", engine, f"{page}/docs/runbooks/leak.finished-held.md"):
        assert link in firing.replace("&amp;", "&")
    if kind != "pagerduty":  # which opens an incident with links, and resolves it without
        assert "&to=" not in firing.replace("&amp;", "&").replace(engine, "")
        assert f"{engine}&to=2023-11-14T22%3A1" in resolved.replace("&amp;", "&")


@pytest.mark.parametrize("kind", ["slack", "pagerduty", "alertmanager"])
def test_a_message_says_first_what_clients_suffer(kind: str) -> None:
    harm = FindingHarm(0.5, 14, 0.35, 192.0)
    with serving() as server:
        address = f"{KEY}@{server.address}" if kind == "pagerduty" else server.address
        with sending(f"{kind}+http://{address}") as alerts:
            alerts.put(AlertMessages().fire(1, harm=harm))
            assert states(alerts) == {"delivered"}
        (body,) = (json.loads(got.body) for got in server.got)
    headline = "14 requests wait: Finished requests keep their blocks on"
    if kind == "pagerduty":
        assert body["payload"]["summary"].startswith(headline)
        return
    header, text = (
        (body["blocks"][0]["text"]["text"], body["blocks"][1]["text"]["text"])
        if kind == "slack"
        else (body[0]["annotations"]["summary"], body[0]["annotations"]["description"])
    )
    assert headline in header
    assert text == ("Requests that wait because of this: 14, 35.0 % of the engine's; together 3 min so far. because")


LINK = re.compile(r"(https?|ftp)://|www\.|mailto:", re.IGNORECASE)


@pytest.mark.parametrize("kind", ["slack", "pagerduty", "alertmanager", ""])
def test_no_receiver_finds_a_link_in_what_clients_chose(kind: str) -> None:
    """Clients choose ids of requests. In texts they lead nowhere. A webhook's `requests` are data, and stay."""
    names = (
        "https://evil.example/login",
        "HTTP://evil.example",
        "www.evil.example",
        "mailto:a@evil.example",
        "ftp://e",
    )
    told = "; ".join(f"cmpl-{name} holds 3 blocks" for name in names)
    own = "monitor doctor http://HOST:8000/metrics --timeout 60"
    with serving() as server:
        address = f"{KEY}@{server.address}" if kind == "pagerduty" else server.address
        with sending(f"{kind}+http://{address}" if kind else server.url) as alerts:
            found = AlertMessages().fire(
                1, engine="vllm@http://evil.example/0", explanation=told, do_now=(told[:200], own), requests=names
            )
            alerts.put(found)
            assert states(alerts) == {"delivered"}
        bodies = [json.loads(got.body) for got in server.got]

    def texts(part: Any, name: str = "") -> list[tuple[str, str]]:
        if isinstance(part, dict):
            return [found for key, value in part.items() for found in texts(value, key)]
        if isinstance(part, list):
            return [found for value in part for found in texts(value, name)]
        return [(name, part)] if isinstance(part, str) else []

    shown = [(name, text.replace(own, "")) for body in bodies for name, text in texts(body)]
    assert any("evil.example" in text for _, text in shown)
    assert any(own in text for body in bodies for _, text in texts(body))
    linked = {name for name, text in shown if LINK.search(text)}
    # Names of engines are labels, which have to match those of metrics.
    assert linked <= {"engine", "source", "group", "id", *(() if kind else ("requests",))}, linked


# -------------------------------------------------------------------- the real Alertmanager

ALERTMANAGER = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")


@pytest.fixture
def alertmanager(tmp_path: Path) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A running one; called, the alerts that it has. Its `url` is at the function."""
    if ALERTMANAGER is None:
        pytest.skip("Alertmanager is not installed here; on Debian: apt-get install prometheus-alertmanager")
    (tmp_path / "alertmanager.yml").write_text("route: {receiver: nobody}\nreceivers: [{name: nobody}]\n")
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [
            ALERTMANAGER,
            f"--config.file={tmp_path}/alertmanager.yml",
            f"--storage.path={tmp_path}/data",
            f"--web.listen-address={address}",
            "--cluster.listen-address=",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = httpx2.Client(base_url=f"http://{address}", trust_env=False)

    def is_ready() -> bool:
        assert process.poll() is None
        try:
            return client.get("/-/ready").is_success
        except httpx2.TransportError:
            return False

    def alerts() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.get("/api/v2/alerts").json()
        return found

    try:
        until(is_ready)
        alerts.url = f"alertmanager+http://{address}"  # type: ignore[attr-defined]
        yield alerts
    finally:
        client.close()
        process.terminate()
        process.wait()


def test_alertmanager_has_what_fires_and_lets_go_of_what_is_over(
    alertmanager: Callable[[], list[dict[str, Any]]],
) -> None:
    """One alert for each trouble, under the labels of the Prometheus rules; the same one again is no other."""
    received_alerts = AlertMessages()
    now_s = 1_790_000_000.0
    with sending(alertmanager.url) as alerts:  # type: ignore[attr-defined]
        alerts.put(received_alerts.fire(now_s, since_ns=round((now_s - 60) * 1e9)))
        alerts.put(received_alerts.fire(now_s, key="another"))
        assert states(alerts) == {"delivered"}
        until(lambda: len(alertmanager()) == 2)
        alerts.replay(alerts.view().deliveries[0].number)
        assert states(alerts) == {"delivered"}
        found = alertmanager()
        assert sorted(one["labels"].get("key", "") for one in found) == ["", "another"]
        (plain,) = [one for one in found if "key" not in one["labels"]]
        assert plain["labels"] == {
            "alertname": "KvscopeFinding",
            "engine": ENGINE,
            "code": "leak.finished-held",
            "severity": "error",
            "runbook": "docs/runbooks/leak.finished-held.md",
        }
        assert plain["annotations"]["description"] == "because"
        assert plain["status"]["state"] == "active"
        alerts.put(received_alerts.end(now_s + 60))
        assert states(alerts) == {"delivered"}
        until(lambda: alertmanager() == [])
        assert [one.delivered for one in alerts.test()] == [True]
        until(lambda: [one["labels"]["alertname"] for one in alertmanager()] == ["KvscopeTest"])
