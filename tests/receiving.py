"""Receivers of alerts: HTTP servers that check what the real ones check, and say what they got."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

PATH = "/hook/a-path-that-nobody-may-know"
Answer = tuple[int, dict[str, str]]


class Got(NamedTuple):
    path: str
    headers: dict[str, str]
    body: str
    status: int


Check = Callable[[Got], int]
"""What a server of some kind answers to a request."""


class Server(ThreadingHTTPServer):
    """Answers with each of `answers` in turn, then as `check` says; keeps what it got."""

    daemon_threads = False

    def __init__(self, *answers: Answer, check: Check = lambda got: 204, tls: tuple[Path, Path] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.answers = list(answers)
        self.check = check
        self.got: list[Got] = []
        self.address = f"127.0.0.1:{self.server_address[1]}"
        self.url = f"http://{self.address}{PATH}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def taken(self) -> list[Got]:
        """What it took, and did not refuse."""
        return [got for got in self.got if got.status < 300]

    def stop(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode(errors="surrogateescape")
        headers = {name.lower(): value for name, value in self.headers.items()}
        got = Got(self.path, headers, body, 0)
        status, extra = self.server.answers.pop(0) if self.server.answers else (self.server.check(got), {})
        self.server.got.append(got._replace(status=status))
        self.send_response(status)
        for name, value in {**extra, "content-length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


# -------------------------------------------------------------------- what the real ones check


class PagerDuty:
    """The Events API v2 as its reference has it: incidents by their dedup keys."""

    def __init__(self, routing_key: str) -> None:
        self.routing_key = routing_key
        self.open: dict[str, dict[str, Any]] = {}
        self.opened: list[str] = []

    def __call__(self, got: Got) -> int:
        event = json.loads(got.body)
        if got.path != "/v2/enqueue" or len(got.body.encode()) > 512 * 1024:
            return 400
        if event["routing_key"] != self.routing_key or len(self.routing_key) != 32:
            return 400
        if event["event_action"] not in ("trigger", "acknowledge", "resolve") or len(event["dedup_key"]) > 255:
            return 400
        if event["event_action"] == "trigger":
            payload = event["payload"]
            summary_is_good = 0 < len(payload["summary"]) <= 1024
            if not summary_is_good or not payload["source"]:
                return 400
            if payload["severity"] not in ("critical", "error", "warning", "info"):
                return 400
            if event["dedup_key"] not in self.open:
                self.opened.append(event["dedup_key"])
            self.open[event["dedup_key"]] = payload
        else:
            self.open.pop(event["dedup_key"], None)
        return 202


def slack(got: Got) -> int:
    """An incoming webhook, with the limits of Slack's Block Kit."""
    message = json.loads(got.body)
    blocks = message["blocks"]
    if not message["text"] or len(message["text"]) > 40_000 or not 0 < len(blocks) <= 50:
        return 400
    for block in blocks:
        if block["type"] == "header":
            good = block["text"]["type"] == "plain_text" and 0 < len(block["text"]["text"]) <= 150
        elif block["type"] == "section":
            good = block["text"]["type"] == "mrkdwn" and 0 < len(block["text"]["text"]) <= 3000
            good = good and block["text"].get("verbatim") is True  # or Slack makes links of what looks like one
        else:
            good = block["type"] == "context" and 0 < len(block["elements"]) <= 10
            good = good and all(
                0 < len(element["text"]) <= 3000 and element.get("verbatim") is True for element in block["elements"]
            )
        if not good:
            return 400
    return 200
