"""What somebody does not want to be told of, and until when.

A silence holds back what begins to fire, and reminders of it. When it ends and the alert still fires, that is told
then; the end of what was told before is told in any case, so that no incident stays open behind a silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Final

import msgspec

from kvscope.monitor.alerting.alert_schema import SilenceView
from kvscope.monitor.alerting.message import Trouble
from kvscope.monitor.errors import KvscopeError
from kvscope.monitor.text import timestamp

MATCHABLE: Final = ("code", "engine", "severity", "verdict", "key")
LONGEST_S: Final = 366 * 86400.0


class BadSilence(KvscopeError, ValueError):
    """A matcher or a length that cannot be used; the message says what it should be."""


class Silence(msgspec.Struct, frozen=True):
    """Alerts that match all of `matchers` (NAME=PATTERN, with * and ?) are not told until `until` (wall seconds)."""

    matchers: tuple[str, ...]
    until: float
    comment: str = ""

    def matches(self, trouble: Trouble) -> bool:
        """Whether it is about this one."""
        return all(
            fnmatchcase(getattr(trouble, name), pattern)
            for name, _, pattern in (matcher.partition("=") for matcher in self.matchers)
        )

    def view(self, number: int) -> SilenceView:
        """As the API says it."""
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
