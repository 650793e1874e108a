"""Requests that never end, are too long or too many, at the servers of the monitor and of the engine."""

from __future__ import annotations

import contextlib
import re
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import httpx2
import pytest

from kvscope.monitor.base import limits
from tests.web.parts import service

NOWHERE = "ipc:///tmp/kvscope-no-engine-is-here"
HALF_BODY = 'POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{{"a'


@contextlib.contextmanager
def engine(stderr: TextIO | None = None) -> Iterator[str]:
    """Our engine with its tiny model, and its address."""
    command = [sys.executable, "-m", "kvscope.engine", "serve", "--port", "0", "--no-stream"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?:\d+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture(scope="module", params=["monitor", "engine"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, int]]:
    """Its address, a path that takes a body, and the most bytes of one."""
    if request.param == "monitor":
        with service("--events", NOWHERE) as url:
            yield url, "/api/alerts/silences", 1 << 20
    else:
        with engine() as url:
            yield url, "/v1/completions", 16 << 20


def connected(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=60)


def status(plain: socket.socket) -> int:
    return int(plain.recv(4096).split()[1])


def test_a_body_beyond_the_bound_is_refused_before_it_is_sent(server: tuple[str, str, int]) -> None:
    url, path, most = server
    with connected(url) as plain:
        plain.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {most + 1}\r\n\r\n".encode())
        assert status(plain) == 413


def test_a_body_of_unstated_length_is_refused_at_the_bound(server: tuple[str, str, int]) -> None:
    url, path, most = server
    with connected(url) as plain:
        plain.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # refused while it is sent
            for _ in range(most // 65536 + 2):
                plain.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert status(plain) == 413


def test_a_body_within_the_bound_arrives_whole(server: tuple[str, str, int]) -> None:
    url, path, most = server
    answer = httpx2.post(url + path, content=b" " * (most - 2) + b"{}", trust_env=False, timeout=60)
    assert answer.status_code in (400, 404)  # read, and then refused for what it says


def test_headers_without_an_end_are_refused(server: tuple[str, str, int]) -> None:
    with connected(server[0]) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                plain.sendall(b"X-More: " + b"x" * 4000 + b"\r\n")
                time.sleep(0.005)
        assert status(plain) == 431


@pytest.mark.slow
def test_half_a_request_is_closed_and_others_are_answered_meanwhile(server: tuple[str, str, int]) -> None:
    url, path, _ = server
    with contextlib.ExitStack() as stack:
        half = [stack.enter_context(connected(url)) for _ in range(20)]
        body = stack.enter_context(connected(url))
        for plain in half:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0")
        body.sendall(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n\r\n12".encode())
        assert httpx2.get(f"{url}/metrics", trust_env=False, timeout=20).status_code == 200
        for plain in (*half, body):
            with contextlib.suppress(ConnectionResetError):
                assert plain.recv(100) == b""


def test_a_connection_stays_open_between_requests(server: tuple[str, str, int]) -> None:
    with httpx2.Client(base_url=server[0], trust_env=False) as client:
        assert [client.get("/metrics").status_code for _ in range(3)] == [200] * 3


def test_half_bodies_take_no_place_of_requests() -> None:
    with service("--events", NOWHERE) as url, contextlib.ExitStack() as stack:
        for _ in range(limits.SERVICE_REQUESTS + 20):
            stack.enter_context(connected(url)).sendall(HALF_BODY.format(path="/api/alerts/silences").encode())
        assert httpx2.get(f"{url}/api/engines", trust_env=False, timeout=60).status_code == 200


@pytest.mark.slow
def test_bodies_being_received_are_bounded_together() -> None:
    part = b" " * (1 << 20)
    with service("--events", NOWHERE) as url, contextlib.ExitStack() as stack:
        head = b"POST /api/alerts/silences HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1048576\r\n\r\n"
        half = [stack.enter_context(connected(url)) for _ in range((limits.SERVICE_BODIES_BYTES >> 20) + 8)]
        for plain in half:
            plain.sendall(head + part[:-1])
        refused, _, _ = select.select(half, [], [], 60)
        assert {status(plain) for plain in refused} == {503}
        assert httpx2.get(f"{url}/healthz", trust_env=False, timeout=60).status_code == 200


@pytest.mark.parametrize("clients", [60, pytest.param(6_000, marks=pytest.mark.slow)])
def test_clients_that_leave_in_the_midst_of_a_body_cost_no_traceback(clients: int, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < clients + 200:
        pytest.skip(f"this machine allows {hard} open files: ulimit -Hn {clients + 200}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    log = tmp_path / "log"
    try:
        with log.open("w") as stderr, engine(stderr) as url, contextlib.ExitStack() as stack:
            for _ in range(clients):
                stack.enter_context(connected(url)).sendall(HALF_BODY.format(path="/v1/completions").encode())
            assert httpx2.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
            stack.close()
            assert httpx2.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200
            assert httpx2.get(f"{url}/load", trust_env=False, timeout=60).json() == {"server_load": 0}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Traceback" not in log.read_text()
