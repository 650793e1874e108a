"""Servers that trickle, flood, compress and redirect: each exchange ends, in time and in bytes."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

import pytest

from kvscope.monitor.base.bounded_http import BoundedClient, HttpFailed, HttpTimeout
from kvscope.monitor.base.http_url import http_url

pytestmark = pytest.mark.usefixtures("real_parts")

Serve = Callable[[socket.socket], None]
OK = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def server(serve: Serve) -> Iterator[str]:
    """A server that reads one request of each connection and then does as it is told."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.1)
    stopping = threading.Event()
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket) -> None:
        with connection:
            connection.recv(65536)
            try:
                serve(connection)
            except OSError:
                return

    def run() -> None:
        while not stopping.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=answer, args=(connection,)))
            threads[-1].start()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        stopping.set()
        thread.join()
        for each in threads:
            each.join()
        listener.close()


def trickle(head: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(300):
            time.sleep(0.05)
            connection.sendall(b"x")

    return serve


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Slow: ", OK + b"Content-Length: 100000\r\n\r\n"])
def test_a_server_that_trickles_is_left_at_the_deadline(head: bytes) -> None:
    """Each read gets its byte well within the timeout."""
    with server(trickle(head)) as url, BoundedClient(0.5) as client:
        with pytest.raises(HttpTimeout):
            client.ask("GET", http_url(url))
        with pytest.raises(HttpTimeout):  # and so is the next exchange
            client.ask("GET", http_url(url))


def test_a_compressed_body_is_refused_unread() -> None:
    bomb = gzip.compress(gzip.compress(b"\0" * (16 << 20)))

    def serve(connection: socket.socket) -> None:
        length = f"Content-Length: {len(bomb)}\r\n\r\n".encode()
        connection.sendall(OK + b"Content-Encoding: gzip, gzip\r\n" + length + bomb)

    with server(serve) as url, BoundedClient(5) as client, pytest.raises(HttpFailed, match="compressed"):
        client.ask("GET", http_url(url))


def test_a_body_that_is_too_long_is_left() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(OK + b"Connection: close\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)

    with (
        server(serve) as url,
        BoundedClient(20, 1_000_000) as client,
        pytest.raises(HttpFailed, match="more than 1,000,000 bytes"),
    ):
        client.ask("GET", http_url(url))


def test_a_redirect_is_an_answer_and_no_more() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/secret\r\nContent-Length: 0\r\n\r\n")

    with server(serve) as url, BoundedClient(5) as client:
        assert client.ask("GET", http_url(url)).status == HTTPStatus.FOUND


def test_a_plain_answer_is_read_and_its_connection_used_again() -> None:
    asked = []

    def serve(connection: socket.socket) -> None:
        for _ in range(2):
            asked.append(1)
            connection.sendall(OK + b"Content-Length: 5\r\n\r\nhello")
            connection.recv(65536)

    with server(serve) as url, BoundedClient(5) as client:
        assert client.ask("GET", http_url(url)).body == b"hello"
        assert client.ask("GET", http_url(url)).body == b"hello"
    assert len(asked) == 2


def test_what_cannot_be_sent_or_reached_is_of_the_one_family() -> None:
    """Whatever the client library, TLS, the system or the encoding of a name raises."""

    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with server(serve) as url, BoundedClient(5) as client:
        here = http_url(url)
        headers = ({"a": "b\r\nc: d"}, {"a b": "c"}, {"a": "\u20ac"}, {"a": "\0"}, {"transfer-encoding": "gzip"})
        for header in headers:
            with pytest.raises(HttpFailed):
                client.ask("POST", here, header, b"hello")
        for host in (
            "a..b",
            "a" * 64,
            ".a",
            "",
            "nowhere.invalid",
            "\u20ac",
            "a\0b",
            "fe80::1%nowhere",
            "300.300.300.300",
        ):
            with pytest.raises(HttpFailed):
                client.ask("GET", here._replace(host=host))
        for changed in (here._replace(port=1), here._replace(path="/a b\r\n")):
            with pytest.raises(HttpFailed):
                client.ask("GET", changed)
        with pytest.raises(HttpFailed, match="TLS"):
            client.ask("GET", here._replace(scheme="https"))
        with pytest.raises(HttpFailed):
            client.ask("G T", here)
        assert client.ask("GET", here).status == HTTPStatus.BAD_REQUEST


def test_an_address_shows_no_password() -> None:
    url = http_url("https://user:hunter2@h:443/a b?c=d#e")
    assert (url.username, url.password) == ("user", "hunter2")
    assert f"{url} {url!r} {[url]}" == "https://h/a%20b?c=d https://h/a%20b?c=d [https://h/a%20b?c=d]"
