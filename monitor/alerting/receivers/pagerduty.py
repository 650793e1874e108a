"""PagerDuty's Events API v2: an incident opens with the first message of an alert and is resolved with its last."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

import httpx
import msgspec

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.receivers.receiver import BadReceiver, Post, Receiver, json_post

LONGEST_SUMMARY: Final = 1_024
KEY_LENGTH: Final = 32


class PagerDuty(Receiver):
    """A service's integration (routing) key, at events.pagerduty.com or events.eu.pagerduty.com."""

    kind: ClassVar[str] = "pagerduty"
    refuses: ClassVar[frozenset[int]] = frozenset({400})
    ends_tests: ClassVar[bool] = True

    def __init__(self, url: httpx.URL, routing_key: str) -> None:
        if len(routing_key) != KEY_LENGTH or not routing_key.isalnum():
            raise BadReceiver("--alert pagerduty+https://ROUTING_KEY@…: a routing key is 32 letters and digits")
        self._routing_key = routing_key
        super().__init__(url.copy_with(path="/v2/enqueue"))

    def secret(self) -> str:
        """Many services share the URL."""
        return self._routing_key

    def post(self, message: Message, now: datetime) -> Post:
        """Return an event whose dedup key is the alert's id, with PagerDuty's own severities."""
        alerted = message.finding
        event: dict[str, Any] = {
            "routing_key": self._routing_key,
            "event_action": "resolve" if message.kind == "resolved" else "trigger",
            "dedup_key": alerted.id,
        }
        if message.kind != "resolved":
            summary = f"{alerted.title} on {alerted.engine}"
            event["client"] = "kvscope"
            event["payload"] = {
                "summary": summary if len(summary) <= LONGEST_SUMMARY else f"{summary[: LONGEST_SUMMARY - 1]}…",
                "source": alerted.engine,
                "severity": alerted.severity,
                "timestamp": message.at,
                "component": "KV cache",
                "group": alerted.engine,
                "class": alerted.code,
                "custom_details": msgspec.to_builtins(alerted) | {"firing_on_engine": message.firing},
            }
        return json_post(event)
