"""Odd answers and odd addresses, through each part that asks a server over HTTP: each has its documented result."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2
import pytest

from kvscope.monitor.base.errors import BadTarget, KvscopeError
from kvscope.monitor.outputs.alerting.alerting import Alerts, AlertsConfig
from kvscope.monitor.outputs.alerting.receivers import BadReceiver, receiver_of
from kvscope.monitor.outputs.otel.export_queue import BadEndpoint, exporters_for
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.sources.discovery_config import discovery_of
from kvscope.monitor.sources.kv_event_stream import discover_kv_endpoints
from kvscope.monitor.terminal.cli import main
from kvscope.monitor.terminal.commands.alerts import AlertsClient
from kvscope.monitor.terminal.report import CANNOT_TELL, USAGE
from tests.finding_transitions import AlertMessages
from tests.test_api import served
from tests.waiting import until

SECRET = "AKIA-SECRET"
"""What no error repeats: it stands for what another server answers to whoever may ask it."""
TOO_LONG = f"http://{'a' * 64}.example/"
LOCATIONS = f"""\

mailto:x
data:,x
javascript:1
//
?
#
http://
http:///x
http://[::1
http://[v1.x]/
http://[fe80::1%25eth0]/
http://a..b/
{TOO_LONG}
http://h:99999/
http://h:-1/
http://u:p@h/
http://xn--/
http://%00/
http://\xff\xfe/
http://\x7f/
http://h/\x01
ht!tp://x
http://{SECRET}/
{"/" * 60_000}""".split("\n")
HEADERS = f"""\
Content-Length: -1
Content-Length: 1e3
Content-Length: {"9" * 30}
Transfer-Encoding: gzip
Content-Encoding: gzip
Content-Encoding: br
Content-Type: text/html; charset=\xff
Connection: upgrade
Set-Cookie: =\x01;;;=
Refresh: 0; url=mailto:x
WWW-Authenticate: Digest x
X-Kvscope: not-known
X: \0
X: a\r
X: {"x" * 200_000}
X y: z
 folded
: x
{SECRET}""".split("\n")
MANY_HEADERS = (
    ["Content-Length: 5", "Content-Length: 6"],
    ["Transfer-Encoding: chunked", "Content-Length: 3"],
    [f"X-{number}: y" for number in range(20_000)],
)
RETRIES = (
    "-1",
    "1e999",
    "9" * 5_000,
    "²",
    "Fri, 31 Dec 9999 23:59:59 -2359",
    "Mon, 99 Foo 0000 99:99:99 GMT",
    "",
    "now",
)
CHUNKED = ("zz", "-5\r\nhello", "f" * 40, "5\r\nhel", "5;x=\0\r\nhello\r\n0", "5\r\nhelloX0\r\n", SECRET)
STATUS_LINES = (
    *("HTTP/1.1", "HTTP/9.9 200 OK", "HTTP/1.0 200", "http/1.1 200 OK", "ICY 200 OK", "", "SSH-2.0-x", "\0"),
    *(f"HTTP/1.1 {status}" for status in ("000", "099", "2oo", "-200", "99999", "600", "999", "200 \xff")),
    *(f"HTTP/1.1 {status} x" for status in (101, 103, 204, 205, 300, 304, 400, 401, 404, 407, 421, 451, 504)),
)
REFUSALS = (("400 x", "bad-time"), ("404 x", "not-known"), ("504 x", "unreachable"))
NO_REFUSALS = ("", "{}", "[1]", '{"detail": 5}', "\xff")


def answer(status: str, *headers: str, body: str = "") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *headers, "", body)).encode("latin-1")


ANSWERS: tuple[bytes, ...] = (
    *(b"", b"HTTP/1.1 200 OK", b"\x15\x03\x01\0\x02\x02\x28", SECRET.encode() * 20_000),
    *(f"{line}\r\nContent-Length: 0\r\n\r\n".encode("latin-1") for line in STATUS_LINES),
    *(answer("100 Continue") * 50, answer("103 x", "Link: <mailto:x>") + answer("404 x", "Content-Length: 0")),
    *(answer("302 Found", f"Location: {location}", "Content-Length: 0") for location in LOCATIONS),
    *(answer(f"{code} x", "Location: mailto:x", "Location: data:,x") for code in (301, 303, 305, 307, 308, 399)),
    *(answer("503 x", f"Retry-After: {wait}", "Content-Length: 0") for wait in RETRIES),
    *(answer("200 OK", header, body=SECRET) for header in HEADERS),
    *(answer("200 OK", *headers, body=SECRET) for headers in MANY_HEADERS),
    *(answer("200 OK", "Transfer-Encoding: chunked", body=f"{body}\r\n\r\n") for body in CHUNKED),
    *(answer("200 OK", body=body) for body in ("\xff\xfe", "[" * 50_000)),
    answer("200 OK", "Content-Length: 100", body=SECRET),
    *(answer(status, f"X-Kvscope: {kind}", body=body) for status, kind in REFUSALS for body in NO_REFUSALS),
)
UNUSABLE_URLS = f"""\
http://a..b/x
http://.a/x
{TOO_LONG}
http://{"a." * 127}bc/
http://
http:///x
http://h:0/
http://h:65536/
http://h:-1/
http://h:x/
http://1:2:3/
http://[::1/x
http://[::g]/
http://[v1.x]/
http://[]/
http://u@/x
http://u:p@:80/
http://a%20b/
http://-%/
http://*/
https://!/x
http://h\\x/
http://ex\u0430mple.org/
http://\uff0e/
http://\u2100.org/
http://\udcff/
http://a b/
http://a\tb/
http://h/\x7f
http://h\r/
http://h/\0""".split("\n")
"""Addresses that cannot be looked up, or whose look-up would be of another name than the one written."""


class OddServer:
    """A server that answers a path /N/… with ANSWERS[N], or everything as it is told, and closes the connection."""

    def __init__(self) -> None:
        self.always = b""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=500)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.urls = tuple(f"{self.url}/{number}" for number in range(len(ANSWERS)))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self._answer(connection)
                except OSError:
                    continue

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(10)
        head, received = b"", b" "
        while b"\r\n\r\n" not in head and received:
            received = connection.recv(65_536)
            head += received
        head, _, body = head.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length and len(body) < int(length[1]):
            body += connection.recv(65_536)
        number = re.match(rb"\w+ /(\d+)", head)
        connection.sendall(self.always or ANSWERS[int(number[1]) if number else 0])
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65_536):  # no reset while the other end still reads
            pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture(scope="module")
def odd() -> Iterator[OddServer]:
    with closing(OddServer()) as server:
        yield server


def is_delivered(number: int) -> bool:
    return re.match(rb"HTTP/\d\.\d 2\d\d\b", ANSWERS[number]) is not None


@contextmanager
def alerting(odd: OddServer) -> Iterator[Alerts]:
    odd.always = b""
    alerts = Alerts(AlertsConfig(odd.urls, allow_private=True, schedule=(0.0, 0.01)))
    alerts.start()
    try:
        yield alerts
    finally:
        alerts.close()


def test_no_answer_of_a_receiver_ends_alerting(odd: OddServer) -> None:
    """Each is tried as often as the schedule says, and what comes later is delivered."""
    messages = AlertMessages()
    with alerting(odd) as alerts:
        alerts.put(messages.fire(1))
        until(lambda: all(view.tries for view in alerts.view().deliveries))
        paused = {view.name for view in alerts.view().receivers if view.paused_until}
        until(lambda: all(view.state != "pending" or view.receiver in paused for view in alerts.view().deliveries))
        answered = {view.receiver: view for view in alerts.view().deliveries}
        for receiver, number in zip(alerts.receivers, range(len(ANSWERS)), strict=True):
            view = answered[receiver.name]
            if receiver.name not in paused:
                assert view.state == "given-up" or (view.state == "delivered" and is_delivered(number)), ANSWERS[number]
                assert view.tries == (1 if view.state == "delivered" else 2), ANSWERS[number]
            assert SECRET.lower() not in view.answer.lower()
        odd.always = answer("204 No Content", "Content-Length: 0")
        alerts.put(messages.fire(2, "stuck.engine-stalled"))
        living = {receiver.name for receiver in alerts.receivers} - paused
        until(
            lambda: (
                {
                    v.receiver
                    for v in alerts.view().deliveries
                    if (v.code, v.state) == ("stuck.engine-stalled", "delivered")
                }
                == living
            ),
        )
    assert 0 < len(paused) < 10


def test_a_test_of_alerts_says_what_was_delivered(odd: OddServer) -> None:
    with alerting(odd) as alerts, served(Pipeline(), alerts=alerts) as url:
        tried = httpx2.post(f"{url}/api/alerts/test", timeout=60, trust_env=False)
        assert tried.status_code == httpx2.codes.OK
        by_name = {one["receiver"]: one for one in tried.json()}
    for number, receiver in enumerate(alerts.receivers):
        one = by_name[receiver.name]
        assert one["answer"], ANSWERS[number]
        assert is_delivered(number) or not one["delivered"], ANSWERS[number]
        assert SECRET.lower() not in one["answer"].lower()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["{}/metrics", "prometheus+{}", "{}/kv_event_sources", "{}"])
def test_doctor_names_what_cannot_be_read(odd: OddServer, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    odd.always = b""
    for number, url in enumerate(odd.urls):
        code = main(["doctor", target.format(url), "--timeout", "10"])
        out, error = capsys.readouterr()
        assert code == CANNOT_TELL, ANSWERS[number]
        said = out + error
        assert "127.0.0.1" in said
        assert "Traceback" not in said
        assert SECRET.lower() not in said.lower()


def find(url: str) -> None:
    with closing(discovery_of("http_sd", {"url": url}).finder()) as finder:
        finder.find()


def ask(url: str) -> None:
    with closing(ServiceClient(url)) as client:
        client.engines()


def list_alerts(url: str) -> None:
    AlertsClient(url).view()


def name_kv_events(url: str) -> None:
    discover_kv_endpoints(url, 10.0)


@pytest.mark.parametrize("asked", [find, ask, list_alerts, name_kv_events])
def test_every_part_that_asks_raises_its_own_error(odd: OddServer, asked: Callable[[str], None]) -> None:
    odd.always = b""
    for number, url in enumerate(odd.urls):
        with pytest.raises((KvscopeError, ValueError)) as raised:
            asked(url)
        assert "127.0.0.1" in str(raised.value), ANSWERS[number]
        assert SECRET.lower() not in str(raised.value).lower()


def test_an_address_that_cannot_be_used_is_refused_where_it_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for url in UNUSABLE_URLS:
        with pytest.raises(BadReceiver, match=r"^--alert: the URL of a webhook receiver cannot be used"):
            receiver_of(url, allow_private=True)
        with pytest.raises(BadTarget, match="is not an address"):
            discovery_of("http_sd", {"url": url}).finder()
        for asked in (ask, list_alerts, name_kv_events):
            with pytest.raises(BadTarget, match="is not an address"):
                asked(url)
        for target in (f"{url}/metrics", f"prometheus+{url}"):
            assert main(["doctor", target]) == USAGE, url
            assert "is not an address" in "".join(capsys.readouterr())
    file = tmp_path / "kvscope.toml"
    file.write_text(f'[[http_sd]]\nurl = "{TOO_LONG}"\n[[kubernetes]]\nselector = "a"\napi = "{TOO_LONG}"\n')
    for arguments in (
        ["config", "check", str(file)],
        ["serve", "--alert", TOO_LONG],
        ["alerts", "list", "--url", TOO_LONG],
    ):
        assert main(arguments) == USAGE
        lines = capsys.readouterr().err.splitlines()
        assert lines
        assert all("1 to 63 letters" in line for line in lines)
    with pytest.raises(BadEndpoint):
        exporters_for(TOO_LONG)


def test_a_name_that_is_not_known_is_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(Alerts(AlertsConfig(("http://nowhere.invalid/x",), schedule=(0.0, 0.01)))) as alerts:
        alerts.start()
        alerts.put(AlertMessages().fire(1))
        until(lambda: [(view.state, view.tries) for view in alerts.view().deliveries] == [("given-up", 2)])
        assert alerts.view().deliveries[0].answer.startswith("nowhere.invalid was not found (")
    assert main(["doctor", "http://nowhere.invalid/metrics"]) == CANNOT_TELL
    assert "nowhere.invalid/metrics was not found (" in "".join(capsys.readouterr())
