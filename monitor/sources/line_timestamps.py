"""The time stamps of log lines, in the formats of vLLM and of the programs that run it.

    08-07 12:00:01                  vLLM's own: neither year nor zone
    INFO 12:00:01                   a shortened copy of it: no date, taken to be that of the log's end
    2026-08-07 12:00:01,123         Python's logging: no zone
    2026-08-07T12:00:01.123+08:00   vLLM's JSON, containers and clusters: with a zone, or Z for UTC

The year that is missing follows from when the log ended. A zone that is missing is taken to be UTC, and counted.
Fractions of a second are left out: vLLM's own stamps have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

SHORT: Final = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b", re.ASCII)
FULL: Final = re.compile(
    r"\b(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,]\d{1,9})?(?: ?(Z)\b| ?([+-])(\d\d):?(\d\d)\b)?", re.ASCII
)
TIME_ONLY: Final = re.compile(r"\b(?:INFO|WARNING|ERROR|DEBUG) (\d\d):(\d\d):(\d\d)\b", re.ASCII)
HEAD: Final = 120
"""A stamp stands at the head of a line. A similar text further on belongs to the message."""


class Stamps:
    """Reads the stamps of one log, line after line. `ended` is when the log was last written to."""

    def __init__(self, ended: datetime) -> None:
        self.without_zone = 0
        """How many had no zone."""
        self._ended = ended
        self._year = 0
        self._month = 0

    def expect_years_of(self, lines: Iterable[str]) -> None:
        """Take the year of the first stamp that has one for that of the stamps that have none."""
        for line in lines:
            if (full := FULL.search(line[:HEAD])) is not None:
                self._year = int(full[1])
                self._month = int(full[2])
                return

    def of(self, line: str, whole: bool = False) -> int | None:
        """Wall time in ns, or None if the line has no stamp. `whole`: it may stand anywhere, as in JSON."""
        head = line if whole else line[:HEAD]
        zone = None
        if (full := FULL.search(head)) is not None:
            year, month, day, hour, minute, second = map(int, full.groups()[:6])
            if full[7] or full[8]:
                zone = timedelta(hours=int(full[9] or 0), minutes=int(full[10] or 0))
                zone = -zone if full[8] == "-" else zone
        elif (short := SHORT.search(head)) is not None:
            month, day, hour, minute, second = map(int, short.groups())
            year = self._year_of(month, day)
        elif (bare := TIME_ONLY.search(head)) is not None:
            hour, minute, second = map(int, bare.groups())
            year, month, day = self._ended.year, self._ended.month, self._ended.day
        else:
            return None
        try:
            moment = datetime(year, month, day, hour, minute, second, tzinfo=timezone(zone or timedelta()))
            seconds = int(moment.timestamp())
        except (ValueError, OverflowError):
            return None
        self.without_zone += zone is None
        return seconds * 1_000_000_000

    def _year_of(self, month: int, day: int) -> int:
        """Return the year of a stamp that has none. The first one's is the latest that is not after the log's end (by
        more than a day: zones differ). A step from one of the last months to one of the first is a new year's, and the
        step back, where several processes' lines are mixed, the old one's again.
        """
        if not self._year:
            limit = self._ended.astimezone(UTC) + timedelta(days=1)
            self._year = limit.year - ((month, day) > (limit.month, limit.day))
        else:
            self._year += (self._month - month > 6) - (month - self._month > 6)
        self._month = month
        return self._year
