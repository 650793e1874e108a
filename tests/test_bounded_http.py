"""Servers that trickle, flood, compress and redirect: each exchange ends, in time and in bytes."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from kvscope.monitor.bounded_http import BodyTooLong, CompressedBody, bounded_client

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
    with server(trickle(head)) as url, bounded_client(0.5) as client:
        with pytest.raises(httpx.TimeoutException):
            client.get(url)
        with pytest.raises(httpx.TimeoutException):  # and so is the next exchange
            client.get(url)


def test_a_compressed_body_is_refused_unread() -> None:
    bomb = gzip.compress(gzip.compress(b"\0" * (16 << 20)))

    def serve(connection: socket.socket) -> None:
        length = f"Content-Length: {len(bomb)}\r\n\r\n".encode()
        connection.sendall(OK + b"Content-Encoding: gzip, gzip\r\n" + length + bomb)

    with server(serve) as url, bounded_client(5) as client, pytest.raises(CompressedBody, match="gzip, gzip"):
        client.get(url)


def test_a_body_that_is_too_long_is_left() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(OK + b"Connection: close\r\n\r\n")
        for _ in range(10_000):
            connection.sendall(b"x" * 10_000)

    with server(serve) as url, bounded_client(20, 1_000_000) as client, pytest.raises(BodyTooLong):
        client.get(url)


def test_a_redirect_is_an_answer_and_no_more() -> None:
    def serve(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/secret\r\nContent-Length: 0\r\n\r\n")

    with server(serve) as url, bounded_client(5) as client:
        assert client.get(url).status_code == httpx.codes.FOUND


def test_a_plain_answer_is_read_and_its_connection_used_again() -> None:
    asked = []

    def serve(connection: socket.socket) -> None:
        for _ in range(2):
            asked.append(1)
            connection.sendall(OK + b"Content-Length: 5\r\n\r\nhello")
            connection.recv(65536)

    with server(serve) as url, bounded_client(5) as client:
        assert client.get(url).text == "hello"
        assert client.get(url).content == b"hello"
    assert len(asked) == 2
