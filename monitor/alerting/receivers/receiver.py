"""What all receivers are: an address, and a way to say a message."""

from __future__ import annotations

import hashlib
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import httpx
import msgspec

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.errors import KvscopeError


class BadReceiver(KvscopeError, ValueError):
    """An --alert URL or a secret that cannot be used; the message says what it should be, and repeats no secret."""


class ReceiverFailed(Exception):
    """A receiver could not format a message; the message repeats no secret."""


class Post(NamedTuple):
    """What is posted for a message."""

    headers: dict[str, str]
    body: bytes


class Receiver:
    """One receiver. Its `name` is told everywhere; the `url` that is posted to, which may be a secret, nowhere."""

    kind: ClassVar[str]
    refuses: ClassVar[frozenset[int]] = frozenset()
    """Answers that another try cannot change."""
    renew_s: ClassVar[float] = 0.0
    """It forgets an alert that is not told again this often, and does its own reminding (0: neither)."""
    ends_tests: ClassVar[bool] = False
    """What a test opens there stays open until it is resolved."""

    def __init__(self, url: httpx.URL, auth: tuple[str, str] | None = None) -> None:
        self.url = url
        self.auth = auth
        whole = f"{self.kind} {url} {self.secret()}"
        self.name = f"{self.kind}-{hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()}"

    def secret(self) -> str:
        """What tells it from another at the same URL; it is hashed."""
        return ":".join(self.auth or ())

    def post(self, message: Message, now: datetime) -> Post:
        """What is posted for a message at `now`."""
        raise NotImplementedError


def json_post(value: Any) -> Post:
    """A value as JSON."""
    return Post({"content-type": "application/json"}, msgspec.json.encode(value))
