"""A Slack incoming webhook: a message in a channel, in blocks, with a line of plain text for notifications."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

from kvscope.monitor.alerting.message import AlertedFinding, Message
from kvscope.monitor.alerting.receivers.receiver import Post, Receiver, json_post
from kvscope.monitor.text import counted, listed

LONGEST_HEADER: Final = 150
LONGEST_SECTION: Final = 3_000
"""Slack refuses what is longer (characters, after escaping)."""
MARKS: Final = {"critical": "🔴", "error": "🔴", "warning": "🟠", "info": "🔵"}


class Slack(Receiver):
    """The webhook's URL is the secret."""

    kind: ClassVar[str] = "slack"
    refuses: ClassVar[frozenset[int]] = frozenset({400, 403, 404})
    """invalid_payload, action_prohibited, no_service."""

    def post(self, message: Message, now: datetime) -> Post:
        """Return a header, the finding, its remedy, and the number of other findings on the engine."""
        alerted = message.finding
        header = f"{_mark(message)} {alerted.title} on {alerted.engine}"
        blocks: list[dict[str, Any]] = [
            {"type": "header", "text": {"type": "plain_text", "text": _cut_for_slack(header, LONGEST_HEADER)}},
            _section(_escaped(alerted.explanation)),
        ]
        if message.kind != "resolved" and alerted.do_now:
            blocks.append(_section("*Do now*\n" + "\n".join(f"• {_escaped(line)}" for line in alerted.do_now)))
        context = {"type": "mrkdwn", "text": _cut_for_slack(_escaped(_context(message, alerted)), LONGEST_SECTION)}
        blocks.append({"type": "context", "elements": [context]})
        return json_post({"text": _cut_for_slack(_escaped(header), LONGEST_SECTION), "blocks": blocks})


def _mark(message: Message) -> str:
    if message.kind == "resolved":
        return "✅ Resolved:"
    return f"{MARKS[message.finding.severity]} {'Still: ' if message.repeat else ''}".strip()


def _context(message: Message, alerted: AlertedFinding) -> str:
    parts = [alerted.code, alerted.severity, alerted.verdict, alerted.since and f"since {alerted.since}"]
    parts.append(f"causes: {listed(alerted.effects)}" if alerted.effects else "")
    others = [code for code in message.firing if code != alerted.code]
    parts.append(f"also firing there: {listed(others)}" if others else "")
    parts.append("it flaps: the next alert follows once it has been resolved for some time" if message.flapping else "")
    if alerted.culprits.requests_in_all:
        parts.append(f"{counted(alerted.culprits.requests_in_all, 'request')}, {alerted.culprits.requests[0]} first")
    return " · ".join(filter(None, parts))


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": _cut_for_slack(text, LONGEST_SECTION)}}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _cut_for_slack(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
