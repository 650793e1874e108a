"""Alerts to a real HTTP receiver: signed, at least once, one id a transition, and nothing said that is secret."""

from __future__ import annotations

import json
import logging
import shutil
import socket
import ssl
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from kvscope.monitor.base.bounded_http import BoundedClient
from kvscope.monitor.detectors.findings import Transition
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig, NoSuchThing, send
from kvscope.monitor.outputs.alerting.message import Message, alerted_finding, message_id
from kvscope.monitor.outputs.alerting.receivers import BadReceiver, is_public, receiver_of
from tests.finding_transitions import AlertMessages, graver, leak
from tests.receiving import PATH, Answer, Server
from tests.waiting import until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8G"
SOON = (0, 0.01, 0.01, 0.01, 0.01)


@pytest.fixture
def receive() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Answer) -> Server:
        servers.append(Server(*answers))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def reported() -> list[Transition]:
    """A leak that fires and is resolved, and a warm cache that is told beside it."""
    found = leak()
    assert "held.prefix-cache" in {t.finding.judgement.code for t in found}
    return found


@pytest.fixture(scope="module")
def transitions(reported: list[Transition]) -> list[Transition]:
    """The leak's two."""
    found = graver(reported)
    assert [(t.finding.judgement.code, t.to) for t in found] == [
        ("leak.finished-held", "firing"),
        ("leak.finished-held", "resolved"),
    ]
    return found


@contextmanager
def sending(
    *urls: str, secret: str = "", path: Path | None = None, schedule: Sequence[float] = SOON
) -> Iterator[Alerts]:
    alerts = Alerts(AlertsConfig(urls, secret, allow_private=True, path=path, schedule=tuple(schedule)))
    alerts.start()
    try:
        yield alerts
    finally:
        alerts.close()


def states(alerts: Alerts) -> list[str]:
    """Of all deliveries, the first first."""
    return [one.state for one in reversed(alerts.view().deliveries)]


def reported_all(alerts: Alerts) -> None:
    until(lambda: alerts.outbox.pending() == 0)


def identities(transitions: list[Transition]) -> list[str]:
    return [message_id(t.finding.id, t.to, t.at_ns) for t in transitions]


def test_each_transition_is_one_signed_message(receive: Callable[..., Server], transitions: list[Transition]) -> None:
    server = receive()
    with sending(server.url, secret=SECRET) as alerts:
        alerts.put(transitions)
        alerts.put(transitions)  # told twice, sent once
        reported_all(alerts)
    fired = transitions[0].finding
    assert [got.headers["webhook-id"] for got in server.got] == identities(transitions)
    for got, to in zip(server.got, ("firing", "resolved"), strict=True):
        assert got.path == PATH
        assert got.headers["host"] == server.address
        message = Webhook(SECRET).verify(got.body, got.headers)
        assert message == json.loads(got.body)
        assert message["type"] == f"kvscope.finding.{to}"
        data = message["data"]
        assert (data["id"], data["code"], data["state"]) == (fired.id, "leak.finished-held", to)
        assert data["engine"] == fired.judgement.engine
        assert data["firing_on_engine"] == (["leak.finished-held"] if to == "firing" else [])
        assert data["culprits"]["requests"] == list(fired.judgement.requests)
        assert data["culprits"]["blocks_in_all"] == len(fired.judgement.blocks)
        assert data["explanation"] == fired.judgement.explanation
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(server.got[0].body + " ", server.got[0].headers)


def test_the_docs_show_what_a_message_holds(receive: Callable[..., Server], transitions: list[Transition]) -> None:
    server = receive()
    with sending(server.url) as alerts:
        alerts.put(transitions[:1])
        reported_all(alerts)
    page = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    sent = json.loads(server.got[0].body)
    assert (list(shown), list(shown["data"])) == (list(sent), list(sent["data"]))
    assert list(shown["data"]["culprits"]) == list(sent["data"]["culprits"])


def test_information_is_not_sent(reported: list[Transition]) -> None:
    alerts = Alerts(AlertsConfig(("http://example.org/",)))
    try:
        alerts.put([t for t in reported if t.finding.severity == "info"])
        assert alerts.view().deliveries == []
    finally:
        alerts.close()


def test_without_a_secret_there_is_no_signature(receive: Callable[..., Server], transitions: list[Transition]) -> None:
    server = receive()
    with sending(server.url) as alerts:
        alerts.put(transitions)
        reported_all(alerts)
    assert "webhook-signature" not in server.got[0].headers
    assert "webhook-id" in server.got[0].headers


def test_the_same_id_on_every_try_and_the_end_after_the_beginning(
    receive: Callable[..., Server], transitions: list[Transition]
) -> None:
    server = receive((500, {}), (503, {}), (400, {}))
    with sending(server.url, secret=SECRET) as alerts:
        alerts.put(transitions)
        reported_all(alerts)
        assert states(alerts) == ["delivered"] * 2
        assert [one.tries for one in reversed(alerts.view().deliveries)] == [4, 1]
    fired, resolved = identities(transitions)
    assert [got.headers["webhook-id"] for got in server.got] == [fired] * 4 + [resolved]
    assert len({got.body for got in server.got}) == 2
    for got in server.got:
        Webhook(SECRET).verify(got.body, got.headers)


def test_it_ends_with_the_schedule_and_can_be_replayed(
    receive: Callable[..., Server], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    server = receive(*[(500, {})] * len(SOON))
    with sending(server.url) as alerts:
        alerts.put(transitions[:1])
        reported_all(alerts)
        assert len(server.got) == len(SOON)
        (given_up,) = alerts.view().deliveries
        assert (given_up.state, given_up.answer, given_up.tries) == ("given-up", "answered 500", len(SOON))
        assert "will not be tried again" in caplog.text
        alerts.replay(given_up.number)
        until(lambda: states(alerts) == ["delivered"])
        with pytest.raises(NoSuchThing, match="no delivery 77"):
            alerts.replay(77)
    assert {got.headers["webhook-id"] for got in server.got} == {identities(transitions)[0]}


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_honoured_and_holds_for_the_whole_receiver(
    receive: Callable[..., Server], transitions: list[Transition], as_date: bool
) -> None:
    until_then = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    server = receive((429, {"retry-after": until_then if as_date else "3600"}))
    with sending(server.url) as alerts:
        before = time.time()
        alerts.put(transitions[:1])
        until(lambda: alerts.view().receivers[0].paused_until)
        alerts.put(AlertMessages().fire(1, "stuck.engine-stalled"))
        for sender in alerts._senders:
            sender.close()
        paused_until = datetime.fromisoformat(alerts.view().receivers[0].paused_until or "").timestamp()
        assert before + 3590 < paused_until < time.time() + 3601
        assert states(alerts) == ["pending"] * 2
    assert len(server.got) == 1


@pytest.mark.parametrize("retry_after", ["soon", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "1e9", ""])
def test_a_retry_after_that_is_no_time_to_come_leaves_it_to_the_schedule(
    receive: Callable[..., Server], transitions: list[Transition], retry_after: str
) -> None:
    server = receive((503, {"retry-after": retry_after}))
    with sending(server.url) as alerts:
        alerts.put(transitions[:1])
        until(lambda: states(alerts) == ["delivered"])


def test_gone_disables_it_until_it_takes_a_test(
    receive: Callable[..., Server], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    server = receive((410, {}))
    other = receive()
    with sending(server.url, other.url) as alerts:
        alerts.put(transitions[:1])
        until(lambda: len(server.got) == len(other.got) == 1 and not alerts.outbox.pending())
        alerts.put(transitions[1:])
        until(lambda: len(other.got) == 2 and not alerts.outbox.pending())
        assert len(server.got) == 1
        gone, there = alerts.view().receivers
        assert gone.disabled_at
        assert there.disabled_at is None
        assert "is gone" in caplog.text
        disabled = [one for one in alerts.view().deliveries if one.state == "disabled"]
        assert [one.kind for one in disabled] == ["resolved", "firing"]
        with pytest.raises(NoSuchThing):
            alerts.replay(disabled[0].number)
        (tried,) = alerts.test(gone.name)
        assert (tried.delivered, tried.answer) == (True, "answered 204")
        assert alerts.view().receivers[0].disabled_at is None
        alerts.replay(disabled[0].number)
        until(lambda: len(server.got) == 3)
    assert [json.loads(got.body)["type"] for got in server.got[1:]] == ["kvscope.test", "kvscope.finding.resolved"]


def test_a_test_says_what_each_answered(receive: Callable[..., Server]) -> None:
    with sending(receive((503, {})).url, receive().url, secret=SECRET) as alerts:
        assert [(one.delivered, one.answer) for one in alerts.test()] == [
            (False, "answered 503"),
            (True, "answered 204"),
        ]
        assert [one.state for one in alerts.view().deliveries] == ["delivered", "given-up"]
        with pytest.raises(NoSuchThing, match="there are: webhook-"):
            alerts.test("pager")


def test_a_redirect_is_not_followed(receive: Callable[..., Server], transitions: list[Transition]) -> None:
    elsewhere = receive()
    server = receive((307, {"location": elsewhere.url}))
    with sending(server.url, schedule=(0, 3600)) as alerts:
        alerts.put(transitions[:1])
        until(lambda: alerts.view().deliveries[0].tries == 1)
        assert alerts.view().deliveries[0].answer.startswith("answered 307: redirects are not followed")
    assert len(server.got) == 1
    assert elsewhere.got == []


def test_what_is_not_delivered_survives(
    receive: Callable[..., Server], transitions: list[Transition], tmp_path: Path
) -> None:
    """Kept over the end of the process, and delivered by the next, with the id that it had."""
    server = receive()
    config = AlertsConfig((server.url,), allow_private=True, path=tmp_path / "data" / "alerts.sqlite")
    first = Alerts(config)
    first.put(transitions[:1])
    first.close()
    with sending(server.url, path=config.path) as second:
        until(lambda: states(second) == ["delivered"])
    assert [got.headers["webhook-id"] for got in server.got] == identities(transitions)[:1]


def test_a_receiver_that_is_not_there_holds_up_no_other(
    receive: Callable[..., Server], transitions: list[Transition]
) -> None:
    gone = receive()
    gone.stop()
    server = receive()
    with sending(gone.url, server.url, schedule=(0, 3600)) as alerts:
        alerts.put(transitions)
        until(lambda: len(server.got) == 2 and sum(one.tries for one in alerts.view().deliveries) == 3)
        waiting = [one for one in alerts.view().deliveries if one.state == "pending"]
        assert [(one.kind, one.tries) for one in waiting] == [("resolved", 0), ("firing", 1)]
        assert waiting[1].answer == "127.0.0.1 does not answer (Connection refused)"


def test_a_private_address_is_not_called_unless_it_is_allowed(
    receive: Callable[..., Server], transitions: list[Transition], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is written out, which is refused at once, or what a name resolves to at the time."""
    server = receive()
    with pytest.raises(BadReceiver, match="--alert-private allows that"):
        Alerts(AlertsConfig((server.url,)))
    with pytest.raises(BadReceiver, match="this machine: --alert-private"):
        Alerts(AlertsConfig(("https://localhost/x",)))
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.skip("this machine does not know its own name")
    port = server.address.partition(":")[2]
    alerts = Alerts(AlertsConfig((f"http://{name}:{port}/",), schedule=(0, 3600)))
    alerts.start()
    try:
        alerts.put(transitions[:1])
        until(lambda: alerts.view().deliveries[0].tries == 1)
        assert "is at the private address" in alerts.view().deliveries[0].answer
    finally:
        alerts.close()
    assert server.got == []


@pytest.mark.parametrize("certified", ["localhost", "elsewhere.example"])
def test_over_tls_it_is_the_name_that_is_certified(
    certified: str, tmp_path: Path, transitions: list[Transition]
) -> None:
    """Though the address that was looked up is what is connected to."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("a certificate is made with openssl, which is not installed here")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            openssl,
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            f"/CN={certified}",
            "-addext",
            f"subjectAltName=DNS:{certified}",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    finding = transitions[0].finding
    message = Message("msg_1", "firing", "", alerted_finding(finding.report(), finding.id, "", "firing"))
    server = Server(tls=(certificate, key))
    try:
        receiver = receiver_of(f"https://localhost:{server.server_port}{PATH}", allow_private=True)
        trusted = ssl.create_default_context(cafile=str(certificate))
        with BoundedClient(5, max_bytes=0, tls=trusted) as client:
            answer = send(client, receiver, message)
    finally:
        server.stop()
    if certified == "localhost":
        assert answer.is_success
        assert server.got[0].headers["host"] == f"localhost:{server.server_port}"
    else:
        assert answer.text.startswith("localhost has a certificate that is not trusted (")
        assert server.got == []


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("::ffff:0:127.0.0.1", False),
        ("::7f00:1", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("64:ff9b::808:808", True),
        ("64:ff9b:1::7f00:1", False),
        ("2002:7f00:1::", False),
        ("2002:808:808::1", True),
        ("2001:0:7f00:1::", False),
        ("fec0::1", False),
        ("ff02::1", False),
        ("192.0.0.192", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("224.0.0.1", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) == public


def test_no_log_record_holds_a_secret(
    receive: Callable[..., Server], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the signing secret nor the receiver's path or password; nor is any in what the API says."""
    caplog.set_level(logging.DEBUG)
    server = receive((500, {}), (410, {}))
    with sending(server.url.replace("http://", "http://user:hunter2@"), secret=SECRET) as alerts:
        alerts.put(transitions[:1])
        reported_all(alerts)
        stated = caplog.text + repr(alerts.view())
    assert len(caplog.records) >= 2
    for secret in (SECRET, SECRET.removeprefix("whsec_"), PATH, "hunter2"):
        assert secret not in stated
    assert server.got[0].headers["authorization"] == "Basic " + b64encode(b"user:hunter2").decode()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://example.org/x",
        "example.org/x",
        "http://",
        "https:///x",
        "http://[::1/x",
        "pigeon+https://example.org",
        "pagerduty+https://events.pagerduty.com",
        "pagerduty+https://short@events.pagerduty.com",
        "slack://example.org/s",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(BadReceiver, match="--alert"):
        Alerts(AlertsConfig((url,)))


def test_a_file_that_cannot_be_used_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("no database, and longer than the header of one would be: " + "x" * 100)
    for path in (tmp_path / "a-file", tmp_path / "a-file" / "alerts.sqlite"):
        with pytest.raises(ValueError, match="--data: alerts cannot be kept in"):
            Alerts(AlertsConfig(("https://example.org/",), path=path))


@pytest.mark.parametrize("secret", ["whsec_", "hunter2", "hunter22", "whsec_c2hvcnQ=", "whsec_" + "A" * 100, "whsec_ä"])
def test_a_secret_that_cannot_be_used_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(BadReceiver, match=r"24 to 64 bytes") as refused:
        Alerts(AlertsConfig(("https://example.org/",), secret))
    assert secret.removeprefix("whsec_") == "" or secret not in str(refused.value)
