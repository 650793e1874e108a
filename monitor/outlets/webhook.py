"""Alerts over HTTP: one message for each transition of a finding, signed by the Standard Webhooks specification.

A message goes into an outbox (SQLite; a file if the service keeps data) before it is sent, and leaves it when the
receiver has answered 2xx: at least once, across restarts, with the same `webhook-id` on every try. Tries are spaced
by the specification's schedule with jitter; Retry-After is honoured, 410 ends it, redirects are not followed.
"""

from __future__ import annotations

import logging
import random
import sqlite3
import threading
import time
from base64 import b64decode
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
from standardwebhooks.webhooks import Webhook as Signer

from monitor.findings import Transition, severity_at_least
from monitor.ledger.words import timestamp

logger = logging.getLogger(__name__)
# It logs each URL in full, and a receiver's URL often is a secret.
logging.getLogger("httpx").setLevel(logging.WARNING)

RETRY_AFTER_S: Final = (0, 5, 300, 1800, 7200, 18000, 36000, 50400, 72000, 86400)
"""Seconds before each try, as the specification proposes."""
SEND_TIMEOUT_S: Final = 15.0
GONE: Final = 410
SECRET_BYTES: Final = range(24, 65)

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS outbox (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL,
    url TEXT NOT NULL,
    body TEXT NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    due REAL NOT NULL,
    UNIQUE (id, url)
)
"""


class BadWebhook(ValueError):
    """A URL or a secret that cannot be used; the message says what it should be."""


class WebhookOutbox:
    """Sends transitions to every URL of `urls`, from a thread of its own, until closed.

    `path` is the outbox's file; None keeps it in memory. `schedule` are the seconds before each try.
    Raises BadWebhook.
    """

    def __init__(
        self,
        urls: Sequence[str],
        secret: str = "",
        path: Path | None = None,
        schedule: Sequence[float] = RETRY_AFTER_S,
    ) -> None:
        for url in urls:
            _require_url(url)
        self._signer = _signer(secret) if secret else None
        self.urls = tuple(urls)
        self.schedule = tuple(schedule)
        self.delivered = 0
        self.given_up = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        self._database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(SCHEMA)
        self._thread = threading.Thread(target=self._run, name="kvscope-webhooks", daemon=True)

    def start(self) -> None:
        """Begin to send, what an earlier life left over first."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is not delivered stays in the outbox."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._database.close()

    def put(self, transitions: Sequence[Transition]) -> None:
        """Take transitions of findings that are warnings or worse."""
        rows = [
            (message_id(transition), url, _body(transition), time.time())
            for transition in transitions
            if severity_at_least(transition.finding.severity, "warning")
            for url in self.urls
        ]
        if rows:
            with self._lock:
                self._database.executemany(
                    "INSERT OR IGNORE INTO outbox (id, url, body, due) VALUES (?, ?, ?, ?)", rows
                )
            self._wake.set()

    def pending(self) -> int:
        """Messages not delivered yet."""
        with self._lock:
            count: int = self._database.execute("SELECT count(*) FROM outbox").fetchone()[0]
            return count

    def _run(self) -> None:
        with httpx.Client(timeout=SEND_TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            while not self._closing:
                self._wake.clear()
                wait = self._send_due(client)
                self._wake.wait(wait)

    def _send_due(self, client: httpx.Client) -> float:
        """Try what is due, in order; seconds until the next is."""
        with self._lock:
            due = self._database.execute(
                "SELECT sequence, id, url, body, tries FROM outbox WHERE due <= ? ORDER BY sequence", (time.time(),)
            ).fetchall()
        for row in due:
            if self._closing:
                return 0.0
            self._try(client, *row)
        with self._lock:
            (next_due,) = self._database.execute("SELECT min(due) FROM outbox").fetchone()
        return 60.0 if next_due is None else max(0.0, next_due - time.time())

    def _try(self, client: httpx.Client, sequence: int, message: str, url: str, body: str, tries: int) -> None:
        now = datetime.now(UTC)
        headers = {
            "content-type": "application/json",
            "webhook-id": message,
            "webhook-timestamp": str(int(now.timestamp())),
        }
        if self._signer is not None:
            headers["webhook-signature"] = self._signer.sign(message, now, body)
        retry_after = 0.0
        try:
            response = client.post(url, content=body, headers=headers)
            if response.is_success:
                self.delivered += 1
                return self._forget(sequence)
            problem = f"answered {response.status_code}"
            if response.status_code == GONE:
                self.given_up += 1
                logger.warning("webhook %s: %s %s, and will not be tried again", message, httpx.URL(url).host, problem)
                return self._forget(sequence)
            retry_after = _seconds(response.headers.get("retry-after", ""))
        except httpx.HTTPError as error:
            problem = type(error).__name__
        if tries + 1 >= len(self.schedule):
            self.given_up += 1
            logger.warning("webhook %s: %s %s at the last try", message, httpx.URL(url).host, problem)
            return self._forget(sequence)
        wait = max(retry_after, self.schedule[tries + 1] * random.uniform(1.0, 1.2))
        logger.info("webhook %s: %s %s; again in %.1f s", message, httpx.URL(url).host, problem, wait)
        with self._lock:
            self._database.execute(
                "UPDATE outbox SET tries = ?, due = ? WHERE sequence = ?", (tries + 1, time.time() + wait, sequence)
            )
        return None

    def _forget(self, sequence: int) -> None:
        with self._lock:
            self._database.execute("DELETE FROM outbox WHERE sequence = ?", (sequence,))


def _require_url(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadWebhook(f"--webhook {url}: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise BadWebhook(f"--webhook {url}: give an http:// or https:// URL")


def _signer(secret: str) -> Signer:
    """The message of BadWebhook does not repeat what was given: it may be most of a secret."""
    try:
        length = len(b64decode(secret.removeprefix("whsec_"), validate=True))
    except ValueError:
        length = 0
    if length not in SECRET_BYTES:
        raise BadWebhook("--webhook-secret: give whsec_ and 24 to 64 bytes in base64")
    return Signer(secret)


def message_id(transition: Transition) -> str:
    """The same for a transition however often it is sent, and no other's."""
    return f"msg_{transition.finding.id}_{transition.to}"


def _body(transition: Transition) -> str:
    report = transition.finding.report()
    message: dict[str, Any] = {
        "type": f"kvscope.finding.{transition.to}",
        "timestamp": timestamp(transition.at_ns),
        "data": {
            "id": report.id,
            "code": report.code,
            "title": report.title,
            "severity": report.severity,
            "verdict": report.verdict,
            "state": transition.to,
            "engine": report.engine,
            "since": report.since,
            "culprits": {
                "requests": report.culprits.requests[:20],
                "requests_in_all": len(report.culprits.requests),
                "blocks_in_all": len(report.culprits.blocks),
            },
            "explanation": report.explanation,
            "do_now": report.do_now,
            "runbook": report.runbook,
        },
    }
    return msgspec.json.encode(message).decode()


def _seconds(retry_after: str) -> float:
    """Retry-After in seconds; a date, which is rare, is left to the schedule."""
    return min(float(retry_after), 86400.0) if retry_after.isdecimal() else 0.0
