"""Alerts to a real HTTP receiver: signed, at least once, one id a transition, and nothing said that is secret."""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from monitor.findings import Transition, severity_at_least
from monitor.outlets.webhook import BadWebhook, WebhookOutbox, message_id
from tests.detectors.scenes import finished_held

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSwMfKQ9r8G"
PATH = "/hook/a-path-that-nobody-may-know"
SOON = (0, 0.01, 0.01, 0.01, 0.01)


class Got(NamedTuple):
    path: str
    headers: dict[str, str]
    body: str


class Receiver(ThreadingHTTPServer):
    """Answers with each of `answers` in turn, then with 204 for ever; keeps what it got."""

    daemon_threads = False

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.got: list[Got] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}{PATH}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, extra = self.server.answers.pop(0) if self.server.answers else (204, {})
        self.send_response(status)
        for name, value in {**extra, "content-length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.server.got.append(Got(self.path, headers, body))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receive() -> Iterator[Callable[..., Receiver]]:
    receivers: list[Receiver] = []

    def start(*answers: tuple[int, dict[str, str]]) -> Receiver:
        receivers.append(Receiver(*answers))
        return receivers[-1]

    yield start
    for receiver in receivers:
        receiver.stop()


@pytest.fixture(scope="module")
def told() -> list[Transition]:
    """A leak that fires and is resolved, and a warm cache that is told beside it."""
    scene = finished_held("leak.finished-held:limit=2")
    scene.live(15)
    assert scene.lab.connector is not None
    for number in list(scene.lab.scheduler.deferred):
        scene.lab.connector._pending[number] = 0
    scene.live(15)
    found = scene.watch.take_transitions()
    assert "held.prefix-cache" in {t.finding.judgement.code for t in found}
    return found


@pytest.fixture(scope="module")
def transitions(told: list[Transition]) -> list[Transition]:
    """The leak's two."""
    graver = [t for t in told if severity_at_least(t.finding.severity, "warning")]
    assert [(t.finding.judgement.code, t.to) for t in graver] == [
        ("leak.finished-held", "firing"),
        ("leak.finished-held", "resolved"),
    ]
    return graver


@contextmanager
def sending(
    *urls: str, secret: str = "", path: Path | None = None, schedule: Sequence[float] = SOON
) -> Iterator[WebhookOutbox]:
    outbox = WebhookOutbox(urls, secret, path, schedule)
    outbox.start()
    try:
        yield outbox
    finally:
        outbox.close()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def rows(path: Path) -> list[tuple[str, int, float]]:
    """What lies in the outbox: id, tries, due."""
    database = sqlite3.connect(path)
    try:
        return database.execute("SELECT id, tries, due FROM outbox ORDER BY sequence").fetchall()
    finally:
        database.close()


def test_each_transition_is_one_signed_message(receive: Callable[..., Receiver], transitions: list[Transition]) -> None:
    receiver = receive()
    with sending(receiver.url, secret=SECRET) as outbox:
        outbox.put(transitions)
        outbox.put(transitions)  # told twice, sent once
        until(lambda: outbox.pending() == 0)
    fired = transitions[0].finding
    assert [got.headers["webhook-id"] for got in receiver.got] == [f"msg_{fired.id}_firing", f"msg_{fired.id}_resolved"]
    for got, to in zip(receiver.got, ("firing", "resolved"), strict=True):
        assert got.path == PATH
        message = Webhook(SECRET).verify(got.body, got.headers)
        assert message == json.loads(got.body)
        assert message["type"] == f"kvscope.finding.{to}"
        data = message["data"]
        assert (data["code"], data["state"], data["engine"]) == ("leak.finished-held", to, fired.judgement.engine)
        assert data["culprits"]["requests"] == list(fired.judgement.requests)
        assert data["culprits"]["blocks_in_all"] == len(fired.judgement.blocks)
        assert data["explanation"] == fired.judgement.explanation
    with pytest.raises(WebhookVerificationError):
        Webhook(SECRET).verify(receiver.got[0].body + " ", receiver.got[0].headers)
    assert outbox.delivered == 2


def test_information_is_not_sent(told: list[Transition]) -> None:
    outbox = WebhookOutbox(["http://127.0.0.1:1/"])
    try:
        outbox.put([t for t in told if t.finding.severity == "info"])
        assert outbox.pending() == 0
    finally:
        outbox.close()


def test_without_a_secret_there_is_no_signature(
    receive: Callable[..., Receiver], transitions: list[Transition]
) -> None:
    receiver = receive()
    with sending(receiver.url) as outbox:
        outbox.put(transitions)
        until(lambda: outbox.pending() == 0)
    assert "webhook-signature" not in receiver.got[0].headers
    assert "webhook-id" in receiver.got[0].headers


def test_the_same_id_on_every_try(receive: Callable[..., Receiver], transitions: list[Transition]) -> None:
    receiver = receive((500, {}), (503, {}), (400, {}))
    with sending(receiver.url, secret=SECRET) as outbox:
        outbox.put(transitions[:1])
        until(lambda: outbox.pending() == 0)
    assert [got.headers["webhook-id"] for got in receiver.got] == [message_id(transitions[0])] * 4
    assert len({got.body for got in receiver.got}) == 1
    for got in receiver.got:
        Webhook(SECRET).verify(got.body, got.headers)
    assert (outbox.delivered, outbox.given_up) == (1, 0)


def test_it_ends_with_the_schedule(
    receive: Callable[..., Receiver], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = receive(*[(500, {})] * 10)
    with sending(receiver.url) as outbox:
        outbox.put(transitions[:1])
        until(lambda: outbox.pending() == 0)
    assert len(receiver.got) == len(SOON)
    assert (outbox.delivered, outbox.given_up) == (0, 1)
    assert "at the last try" in caplog.text


def test_retry_after_is_honoured(
    receive: Callable[..., Receiver], transitions: list[Transition], tmp_path: Path
) -> None:
    receiver = receive((429, {"retry-after": "3600"}))
    with sending(receiver.url, path=tmp_path / "outbox.sqlite") as outbox:
        before = time.time()
        outbox.put(transitions[:1])
        until(lambda: rows(tmp_path / "outbox.sqlite")[0][1] == 1)
    ((_, tries, due),) = rows(tmp_path / "outbox.sqlite")
    assert tries == 1
    assert due >= before + 3600


@pytest.mark.parametrize("retry_after", ["soon", "-5", "Wed, 21 Oct 2015 07:28:00 GMT", "1e9", ""])
def test_a_retry_after_that_is_no_number_leaves_it_to_the_schedule(
    receive: Callable[..., Receiver], transitions: list[Transition], retry_after: str
) -> None:
    receiver = receive((503, {"retry-after": retry_after}))
    with sending(receiver.url) as outbox:
        outbox.put(transitions[:1])
        until(lambda: outbox.delivered == 1)


def test_gone_ends_it(
    receive: Callable[..., Receiver], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = receive((410, {}))
    with sending(receiver.url) as outbox:
        outbox.put(transitions[:1])
        until(lambda: outbox.pending() == 0)
    assert len(receiver.got) == 1
    assert (outbox.delivered, outbox.given_up) == (0, 1)
    assert "will not be tried again" in caplog.text


def test_a_redirect_is_not_followed(
    receive: Callable[..., Receiver], transitions: list[Transition], tmp_path: Path
) -> None:
    elsewhere = receive()
    receiver = receive((307, {"location": elsewhere.url}))
    with sending(receiver.url, path=tmp_path / "outbox.sqlite", schedule=(0, 3600)) as outbox:
        outbox.put(transitions[:1])
        until(lambda: rows(tmp_path / "outbox.sqlite")[0][1] == 1)
    assert len(receiver.got) == 1
    assert elsewhere.got == []


def test_what_is_not_delivered_survives(
    receive: Callable[..., Receiver], transitions: list[Transition], tmp_path: Path
) -> None:
    """Refused by a receiver that is down, kept over the end of the process, and delivered by the next."""
    receiver = receive((500, {}))
    path = tmp_path / "outbox.sqlite"
    first = WebhookOutbox([receiver.url], SECRET, path, schedule=SOON)
    first.put(transitions[:1])
    first.close()
    assert [row[0] for row in rows(path)] == [message_id(transitions[0])]
    with sending(receiver.url, secret=SECRET, path=path) as second:
        until(lambda: second.delivered == 1)
    assert rows(path) == []
    assert {got.headers["webhook-id"] for got in receiver.got} == {message_id(transitions[0])}


def test_a_receiver_that_is_not_there_holds_up_no_other(
    receive: Callable[..., Receiver], transitions: list[Transition], tmp_path: Path
) -> None:
    gone = receive()
    gone.stop()
    receiver = receive()
    with sending(gone.url, receiver.url, path=tmp_path / "outbox.sqlite", schedule=(0, 3600)) as outbox:
        outbox.put(transitions)
        until(lambda: outbox.delivered == 2)
    assert len(receiver.got) == 2
    assert [row[1] for row in rows(tmp_path / "outbox.sqlite")] == [1, 1]


def test_no_log_record_holds_a_secret(
    receive: Callable[..., Receiver], transitions: list[Transition], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the signing secret nor the receiver's path, which with many receivers is one."""
    caplog.set_level(logging.INFO)
    receiver = receive((500, {}), (410, {}))
    with sending(receiver.url, secret=SECRET) as outbox:
        outbox.put(transitions[:1])
        until(lambda: outbox.pending() == 0)
    assert len(caplog.records) >= 2
    for secret in (SECRET, SECRET.removeprefix("whsec_"), PATH):
        assert secret not in caplog.text


@pytest.mark.parametrize("url", ["", "ftp://example.org/x", "example.org/x", "http://", "https:///x", "http://[::1/x"])
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(BadWebhook, match="--webhook"):
        WebhookOutbox([url])


@pytest.mark.parametrize("secret", ["whsec_", "hunter2", "hunter22", "whsec_c2hvcnQ=", "whsec_" + "A" * 100, "whsec_ä"])
def test_a_secret_that_cannot_be_used_is_refused_and_not_repeated(secret: str) -> None:
    with pytest.raises(BadWebhook, match=r"24 to 64 bytes") as refused:
        WebhookOutbox(["http://127.0.0.1:1/"], secret)
    assert secret.removeprefix("whsec_") == "" or secret not in str(refused.value)
