"""A receiver for acme+http(s)://HOST/PATH: Acme's pager takes one line of text for each alert."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from kvscope.monitor.base.http_url import http_url
from kvscope.monitor.outputs.alerting.message import Message
from kvscope.monitor.outputs.alerting.receivers import Post, Receiver


class Pager(Receiver):
    """Posts the finding's code and engine as text."""

    kind: ClassVar[str] = "acme"

    def __init__(self, url: str) -> None:
        super().__init__(http_url(url.removeprefix("acme+")))

    def post(self, message: Message, now: datetime) -> Post:
        """Return one line."""
        text = f"{message.kind} {message.finding.code} {message.finding.engine}"
        return Post({"content-type": "text/plain"}, text.encode())
