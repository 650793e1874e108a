"""The interface of all receivers: an address, and a way to format a message."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.errors import KvscopeError


class BadReceiver(KvscopeError, ValueError):
    """An --alert URL or a secret that cannot be used. The message names the valid form, and repeats no secret."""


class ReceiverFailed(Exception):
    """A receiver could not format a message. The error repeats no secret."""


class Post(NamedTuple):
    """The HTTP request for a message."""

    headers: dict[str, str]
    body: bytes


class Receiver:
    """One receiver. Its `name` appears everywhere, its `url`, which may be a secret, nowhere."""

    kind: ClassVar[str]
    refuses: ClassVar[frozenset[int]] = frozenset()
    """Answers that another try cannot change."""
    renew_s: ClassVar[float] = 0.0
    """The receiver forgets an alert that is not repeated this often, and sends its own reminders (0: neither)."""
    ends_tests: ClassVar[bool] = False
    """An alert from a test stays open there until it is resolved."""

    def __init__(self, url: httpx.URL, auth: tuple[str, str] | None = None) -> None:
        self.url = url
        self.auth = auth
        whole = f"{self.kind} {url} {self.secret()}"
        self.name = f"{self.kind}-{hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()}"

    def secret(self) -> str:
        """Return the part that separates it from another receiver at the same URL. Callers hash it."""
        return ":".join(self.auth or ())

    def post(self, message: Message, now: datetime) -> Post:
        """Return the HTTP request for a message at `now`."""
        raise NotImplementedError


def json_post(value: Any) -> Post:
    """Return a value as a JSON request."""
    return Post({"content-type": "application/json"}, msgspec.json.encode(value))
