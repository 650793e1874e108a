"""What a wrong address answers stays there: an error names the place and the kind of problem, and quotes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.questions.client import ServiceClient
from kvscope.monitor.sources.metrics_page import MetricsPage
from kvscope.monitor.sources.prometheus_history import PrometheusHistory
from kvscope.monitor.sources.source import SourceOptions

pytestmark = pytest.mark.usefixtures("real_parts")

SECRET = "AKIA-SECRET"
SERIES = f'{{"metric":{{"__name__":"vllm:num_requests_running"}},"values":[[1700000000,"{SECRET}"]]}}'
MATRIX = '{"status":"success","data":{"resultType":"matrix","result":[%s]}}'


def http(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


ANSWERS = {
    "no number": http(f"vllm:num_requests_running {SECRET}\n"),
    "no page": http(f"{SECRET} {{"),
    "another page": http(f"# HELP {SECRET} x\n{SECRET.replace('-', '_')} 1\n"),
    "status": http("", f"500 {SECRET}"),
    "no http": f"{SECRET} 220 ready\r\n".encode(),
    "no header": f"HTTP/1.1 200 OK\r\n{SECRET}\r\n\r\n".encode(),
    "redirect": f"HTTP/1.1 302 Found\r\nLocation: http://{SECRET}/\r\nContent-Length: 0\r\n\r\n".encode(),
    "length": f"HTTP/1.1 200 OK\r\nContent-Length: {SECRET}\r\n\r\n".encode(),
    "error": http(f'{{"status":"error","errorType":"{SECRET}","error":"{SECRET}"}}', "400 Bad Request"),
    "known error": http(f'{{"status":"error","errorType":"bad_data","error":"{SECRET}"}}', "400 Bad Request"),
    "no sample": http(MATRIX % SERIES),
    "no time": http(MATRIX % SERIES.replace("1700000000", "1e400").replace(SECRET, "1")),
    "not text": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
    "detail": http(f'{{"detail":"{SECRET}"}}', "404 Not Found"),
    "enum": http(f'[{{"engine":"{SECRET}","signal":"{SECRET}"}}]'),
}


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """A server that answers everything with these bytes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                peer.sendall(content)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def scrape(url: str) -> None:
    page = MetricsPage(f"{url}/metrics", timeout_s=5)
    try:
        page.scrape()
    finally:
        page.close()


def query(url: str) -> None:
    history = PrometheusHistory(url, SourceOptions(timeout_s=5))
    try:
        history.poll()
    finally:
        history.close()


def ask(url: str) -> None:
    client = ServiceClient(url, timeout_s=5)
    try:
        client.engines()
    finally:
        client.close()


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("read", [scrape, query, ask])
def test_an_answer_is_not_quoted(read: Callable[[str], None], answer: str) -> None:
    with answering(ANSWERS[answer]) as url, pytest.raises(Exception, match=r"127\.0\.0\.1") as raised:
        read(url)
    assert SECRET.lower() not in str(raised.value).lower()
    assert isinstance(raised.value, KvscopeError)


def test_prometheus_own_kind_of_error_is_named() -> None:
    with answering(ANSWERS["known error"]) as url, pytest.raises(KvscopeError, match=r"bad_data"):
        query(url)
