"""Alertmanager's API, version 2: POST /api/v2/alerts. It groups, reminds and routes by itself.

It identifies an alert by its labels, and resolves one that is not repeated until `endsAt`. So a firing alert is sent
again and again, as Prometheus does it.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import ClassVar, Final

from kvscope.monitor.alerting.message import Message
from kvscope.monitor.alerting.receivers.receiver import Post, Receiver, json_post

RENEW_S: Final = 60.0
ENDS_AFTER: Final = timedelta(seconds=4 * RENEW_S)
"""As Prometheus: three renewals may be lost."""


class Alertmanager(Receiver):
    """Its base URL without /api/v2. The labels match those of kvscope's Prometheus rules, so that both are one
    alert.
    """

    kind: ClassVar[str] = "alertmanager"
    refuses: ClassVar[frozenset[int]] = frozenset({400})
    renew_s: ClassVar[float] = RENEW_S

    def post(self, message: Message, now: datetime) -> Post:
        """One alert. `key`, which separates problems of the same code, is a label where there is one."""
        alerted = message.finding
        labels = {
            "alertname": "KvscopeTest" if message.kind == "test" else "KvscopeFinding",
            "engine": alerted.engine,
            "code": alerted.code,
            "severity": alerted.severity,
            "key": alerted.key,
            "runbook": alerted.runbook,
        }
        ends = _rfc3339(now + ENDS_AFTER)
        if message.kind == "resolved":
            ends = alerted.resolved_at or _rfc3339(now)
        alert = {
            "labels": {name: value for name, value in labels.items() if value},
            "annotations": {
                "summary": f"{alerted.title} on {alerted.engine}",
                "description": alerted.explanation,
                "do_now": "\n".join(alerted.do_now),
                "verdict": alerted.verdict,
                "finding": alerted.id,
            },
            "startsAt": min(alerted.since or message.at, ends),
            "endsAt": ends,
        }
        return json_post([alert])


def _rfc3339(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
