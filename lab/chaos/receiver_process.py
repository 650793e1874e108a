"""A webhook in a process of its own that writes what it accepts to a file before it answers.

python -m kvscope.lab.chaos.receiver_process ADDRESS PORT LOG

A line of LOG is the time, the webhook-id and the data of one message. While LOG.refuse exists, it answers 503.
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class LoggingHandler(BaseHTTPRequestHandler):
    """Accepts a message by writing it down."""

    log: Path

    def do_POST(self) -> None:
        """Write the message down, then answer 204."""
        body = self.rfile.read(int(self.headers["content-length"]))
        refuses = Path(f"{self.log}.refuse").exists()
        if not refuses:
            entry = {"at_s": time.monotonic(), "id": self.headers["webhook-id"], "data": json.loads(body)["data"]}
            with self.log.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        self.send_response(503 if refuses else 204)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""


class ReceiverServer(ThreadingHTTPServer):
    """Takes over a port that the one before it has just left."""

    allow_reuse_address = True
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed is no error."""


def main() -> None:
    """Serve until killed."""
    address, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    LoggingHandler.log = log
    server = ReceiverServer((address, port), LoggingHandler)
    print("ready", flush=True)
    server.serve_forever(0.05)


if __name__ == "__main__":
    main()
