"""`monitor serve` as a process: a real stream in, alerts, spans and figures out, and an end without a trace."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest
from standardwebhooks.webhooks import Webhook

from kvscope.lab.recorded_pages import page, rows, served
from kvscope.monitor.terminal.cli import main
from tests.waiting import until

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
LEAK = "leak.finished-held:limit=3"


class Received(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        pass


@contextmanager
def receiver() -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Received)
    server.daemon_threads = False
    server.received = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.received  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    started = subprocess.Popen([sys.executable, "-m", *arguments], stdout=pipe, stderr=pipe, text=True)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def test_from_a_leak_to_an_alert_a_span_and_a_figure(tmp_path: Path) -> None:
    events = f"ipc://{tmp_path}/events"
    with (
        receiver() as (url, received),
        process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "4", LEAK) as engine,
        process(
            "kvscope.monitor",
            "serve",
            "--port",
            "0",
            "--events",
            events,
            "--data",
            str(tmp_path / "data"),
            "--alert",
            f"{url}/alerts",
            "--alert-private",
            "--webhook-secret",
            SECRET,
            "--otlp",
            url,
            "--set",
            "leak.finished-held.grace_s=1",
        ) as service,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        assert service.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", service.stderr.readline())
        assert address is not None
        with httpx2.Client(base_url=address[0], trust_env=False) as client:
            until(lambda: any(path == "/alerts" for path, _, _ in received), "an alert")
            until(lambda: any(path == "/v1/traces" for path, _, _ in received), "a span")
            _, headers, body = next(item for item in received if item[0] == "/alerts")
            message = Webhook(SECRET).verify(body, headers)
            assert message == json.loads(body)
            assert message["type"] == "kvscope.finding.firing"
            assert message["data"]["code"] == "leak.finished-held"
            assert message["data"]["culprits"]["requests"]
            page = client.get("/metrics").text
            assert 'code="leak.finished-held"' in page
            runbook = client.get("/" + message["data"]["runbook"])
            assert runbook.text.startswith("# leak.finished-held")
            (finding,) = [f for f in client.get("/api/findings").json() if f["code"] == "leak.finished-held"]
            assert finding["id"] == message["data"]["id"]
        service.send_signal(signal.SIGTERM)
        _, stated = service.communicate(timeout=30)
        assert service.returncode == 0
        assert "Traceback" not in stated
        assert SECRET not in stated


def test_an_engine_without_a_probe_is_watched_by_its_metrics_page() -> None:
    row = rows("never-freed")[30]
    with (
        served(page(row)) as engine,
        process("kvscope.monitor", "serve", "--port", "0", "--metrics", engine.url) as service,
    ):
        assert service.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", service.stderr.readline())
        assert address is not None
        with httpx2.Client(base_url=address[0], trust_env=False) as client:
            until(lambda: client.get("/api/engines").json(), "an engine")
            (seen,) = client.get("/api/engines").json()
            assert (seen["signal"], seen["running"], seen["usage"]) == ("metrics", row["running"], row["kv_usage"])
            assert [f["code"] for f in client.get("/api/findings").json()] == ["blind.counter-lag"]
            (source,) = client.get("/api/sources").json()
            assert (source["target"], source["engine"], source["error"]) == (engine.url, seen["engine"], "")
        service.send_signal(signal.SIGTERM)
        _, stated = service.communicate(timeout=30)
        assert service.returncode == 0
        assert "Traceback" not in stated


@pytest.mark.slow
def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, says in (
            (["--host", "0.0.0.0"], "set a token"),
            (["--alert", "ftp://x"], "http"),
            (["--alert", "http://10.0.0.1/hook"], "--alert-private"),
            (["--alert", "http://x", "--webhook-secret", "short"], "whsec_"),
            (["--alert-repeat", "often"], "30m"),
            (["--events", "carrier pigeon"], "endpoint"),
            (["--metrics", "carrier pigeon"], "is not an address"),
            (["--port", port], "in use"),
            (["--otlp", "carrier pigeon"], "grpc://HOST:4317"),
            (["--set", "leak.finished-held.nothing=1"], "no threshold"),
        ):
            refused = subprocess.run(
                [sys.executable, "-m", "kvscope.monitor", "serve", *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )
            assert refused.returncode == 2, arguments
            assert says in refused.stderr, refused.stderr
            assert "Traceback" not in refused.stderr


def test_record_keeps_what_doctor_reads(tmp_path: Path) -> None:
    events = f"ipc://{tmp_path}/events"
    with process("kvscope.lab.stepped_process", events, f"{events}-replay", "", "5", LEAK) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        assert main(["record", events, str(tmp_path / "run"), "--seconds", "3"]) == 0
        assert main(["record", events, str(tmp_path / "run"), "--seconds", "3"]) == 2
    assert main(["doctor", str(tmp_path / "run"), "--set", "leak.finished-held.grace_s=0.5", "--format", "json"]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_server_runs_ends_it_too(wanted: signal.Signals) -> None:
    """From its announcement on a service can be stopped: its threads start before its server takes signals."""
    with process("kvscope.monitor", "serve", "--port", "0", "--events", "tcp://127.0.0.1:9") as served_by:
        assert served_by.stderr is not None
        assert any("kvscope serves" in line for line in served_by.stderr)
        served_by.send_signal(wanted)
        served_by.communicate(timeout=30)
        assert served_by.returncode in (0, -wanted)
