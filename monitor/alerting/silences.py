"""Alerts to send no notifications about, and until when.

A silence holds back what begins to fire, and reminders of it. If the alert still fires at its end, a notification
follows then. The end of an alert whose start was sent is always sent, so that no incident stays open behind a silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from kvscope.monitor.alerting.alert_schema import SilenceView
from kvscope.monitor.alerting.message import AlertedFinding
from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.text import timestamp

MATCHABLE: Final = ("code", "engine", "severity", "verdict", "key")
LONGEST_S: Final = 366 * 86400.0


class BadSilence(KvscopeError, ValueError):
    """A matcher or a length that cannot be used. The message names the valid form."""


class Silence(msgspec.Struct, frozen=True):
    """No notifications for alerts that match all of `matchers` (NAME=PATTERN, with * and ?) until `until` (wall
    seconds).
    """

    matchers: tuple[str, ...]
    until: float
    comment: str = ""

    def matches(self, alerted: AlertedFinding) -> bool:
        """Whether it is about this one."""
        return all(
            fnmatchcase(getattr(alerted, name), pattern)
            for name, _, pattern in (matcher.partition("=") for matcher in self.matchers)
        )

    def view(self, number: int) -> SilenceView:
        """Return it for the API."""
        return SilenceView(number, list(self.matchers), timestamp(round(self.until * 1e9)) or "", self.comment)


def silence(matchers: Sequence[str], seconds: float, comment: str, now: float) -> Silence:
    """From `now` (wall seconds) for so long. Raises BadSilence."""
    if not matchers:
        raise BadSilence("a silence needs at least one matcher, such as code=leak.* or engine=NAME")
    for matcher in matchers:
        name, equals, pattern = matcher.partition("=")
        if name not in MATCHABLE or not equals or not pattern:
            raise BadSilence(f"{matcher}: give NAME=PATTERN, where NAME is one of {', '.join(MATCHABLE)}")
    if not 0 < seconds <= LONGEST_S:
        raise BadSilence(f"{seconds:g} s: a silence lasts more than 0 s and at most {LONGEST_S:g} s")
    return Silence(tuple(matchers), now + seconds, comment)
