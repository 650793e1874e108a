"""Metrics pages that trickle, explode, redirect or grow: each is refused or cut off, and the next scrape works."""

from __future__ import annotations

import gzip
import socket
import time

import pytest

from kvscope.lab.recorded_pages import BEGAN_S, At, served
from kvscope.monitor.base import limits
from kvscope.monitor.contract.samples import Sample
from kvscope.monitor.sources.metrics_page import BadPage, MetricsPage
from tests.test_bounded_http import OK, Serve, server, trickle

HEAD = "# TYPE vllm:num_requests_running gauge\n"


def page_of(names: range, value: str = "1") -> str:
    rows = (f'vllm:num_requests_running{{engine="0",model_name="m-{n}"}} {value}\n' for n in names)
    return HEAD + "".join(rows)


def sending(body: bytes, encoding: str = "") -> Serve:
    def serve(connection: socket.socket) -> None:
        header = f"Content-Encoding: {encoding}\r\n" if encoding else ""
        connection.sendall(OK + f"{header}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    return serve


def redirect(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/secret\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize(
    ("serve", "says"),
    [
        (trickle(b""), "did not answer within"),
        (trickle(b"HTTP/1.1 200 OK\r\nX-Slow: "), "did not answer within"),
        (sending(gzip.compress(gzip.compress(b"\0" * (8 << 20))), "gzip, gzip"), "compressed"),
        (sending(page_of(range(1), "9" * 400).encode()), "values that no engine has"),
        (sending(b"AKIASECRETSECRET"), "not a metrics page"),
        (redirect, "follows no redirect"),
    ],
)
def test_a_page_that_cannot_be_read_ends_in_time_and_is_counted(serve: Serve, says: str) -> None:
    with server(serve) as url:
        reader = MetricsPage(url, timeout_s=1.0)
        try:
            began = time.monotonic()
            with pytest.raises(BadPage, match=says):
                reader.scrape()
            assert time.monotonic() - began < 10
            status = reader.status()
            assert status.error
            assert not status.in_step
            assert status.skipped == 1
            assert "SECRET" not in status.error
        finally:
            reader.close()


def test_a_page_with_new_labels_at_each_scrape_is_cut_off_and_that_is_reported() -> None:
    clock = At(BEGAN_S)
    with served() as running:
        reader = MetricsPage(running.url, clock=clock)
        try:
            engines: set[str] = set()
            for turn in range(5):
                running.answer = page_of(range(turn * 50, turn * 50 + 50))
                engines |= {record.engine for record in reader.scrape() if isinstance(record, Sample)}
                clock.seconds += 15
            assert len(engines) == limits.PAGE_ENGINES
            assert "left out" in reader.status().error
            # Those that are gone make room for others, after a while.
            clock.seconds += limits.GONE_S
            running.answer = page_of(range(1_000, 1_010))
            assert len([record for record in reader.scrape() if isinstance(record, Sample)]) == 10
            assert not reader.status().error
        finally:
            reader.close()
