"""Sources and a receiver that fail."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import ClassVar

from kvscope.monitor.base.http_url import http_url
from kvscope.monitor.contract.samples import Record
from kvscope.monitor.outputs.alerting.message import Message
from kvscope.monitor.outputs.alerting.receivers import Post, Receiver
from kvscope.monitor.sources.source import Source, SourceOptions, SourceStatus


class RaisingSource(Source):
    """It raises in every poll."""

    def __init__(self, target: str, options: SourceOptions) -> None:
        self.target = target

    def poll(self, timeout_s: float = 0.1) -> list[Record]:
        """Raise."""
        raise ZeroDivisionError("this source divides by zero")

    def status(self) -> SourceStatus:
        """Claim that all is well."""
        return SourceStatus(target=self.target, kind="broken", in_step=True)


class HangingSource(RaisingSource):
    """It never returns."""

    def poll(self, timeout_s: float = 0.1) -> list[Record]:
        """Wait for what never comes."""
        threading.Event().wait()
        return []


class RaisingReceiver(Receiver):
    """It raises for every message."""

    kind: ClassVar[str] = "broken"

    def __init__(self, url: str) -> None:
        super().__init__(http_url(url.removeprefix("broken+")))

    def post(self, message: Message, now: datetime) -> Post:
        """Raise."""
        raise ZeroDivisionError("this receiver divides by zero")
