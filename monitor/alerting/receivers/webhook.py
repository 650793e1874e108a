"""A webhook by the Standard Webhooks specification (standardwebhooks.com): id, timestamp and signature in headers."""

from __future__ import annotations

from base64 import b64decode
from datetime import datetime
from typing import Any, ClassVar, Final

import httpx
import msgspec
from standardwebhooks.webhooks import Webhook as Signer

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.receivers.receiver import BadReceiver, Post, Receiver, json_post

SECRET_BYTES: Final = range(24, 65)


class Webhook(Receiver):
    """Any HTTP server. With a secret, the message is signed."""

    kind: ClassVar[str] = "webhook"

    def __init__(self, url: httpx.URL, auth: tuple[str, str] | None, secret: str) -> None:
        super().__init__(url, auth)
        self._signer = _signer(secret) if secret else None

    def post(self, message: Message, now: datetime) -> Post:
        """Return a body that is the same at every try. Only the time of sending, and so the signature, differs."""
        kind = "kvscope.test" if message.kind == "test" else f"kvscope.finding.{message.kind}"
        data: dict[str, Any] = msgspec.to_builtins(message.finding)
        data |= {"firing_on_engine": message.firing, "repeat": message.repeat, "flapping": message.flapping}
        post = json_post({"type": kind, "timestamp": message.at, "data": data})
        post.headers["webhook-id"] = message.id
        post.headers["webhook-timestamp"] = str(int(now.timestamp()))
        if self._signer is not None:
            post.headers["webhook-signature"] = self._signer.sign(message.id, now, post.body.decode())
        return post


def _signer(secret: str) -> Signer:
    try:
        length = len(b64decode(secret.removeprefix("whsec_"), validate=True))
    except ValueError:
        length = 0
    if length not in SECRET_BYTES:
        raise BadReceiver("--webhook-secret: give whsec_ and 24 to 64 bytes in base64")
    return Signer(secret)
