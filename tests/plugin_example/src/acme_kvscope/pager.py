"""A receiver for acme+http(s)://HOST/PATH: Acme's pager takes one line of text for each alert."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

import httpx

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.receivers.receiver import Post, Receiver


class Pager(Receiver):
    """Posts the finding's code and engine as text."""

    kind: ClassVar[str] = "acme"

    def __init__(self, url: str) -> None:
        super().__init__(httpx.URL(url.removeprefix("acme+")))

    def post(self, message: Message, now: datetime) -> Post:
        """Return one line."""
        text = f"{message.kind} {message.finding.code} {message.finding.engine}"
        return Post({"content-type": "text/plain"}, text.encode())
