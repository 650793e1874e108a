"""A time in a query: a time, or a position in an engine's stream."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kvscope.monitor.errors import BadTime
from kvscope.monitor.ledger.engine_ledger import Position
from kvscope.monitor.text import moment, timestamp

_POSITION: Final = re.compile(r"(\d{1,20})/(\d{1,15})(?:/(\d{1,9}))?")


class StreamTime(NamedTuple):
    """A time (wall ns), or just after an event, or with `whole_batch` after the last one of its batch."""

    at_ns: int
    position: Position | None = None
    whole_batch: bool = False

    def __str__(self) -> str:
        """Return it formatted for display."""
        return timestamp(self.at_ns) or "" if self.position is None else f"position {self.position}"


def parse_stream_time(text: str, near_ns: int) -> StreamTime:
    """Return the time that `text` names. A time of day is the last such until `near_ns` (wall). Raises BadTime."""
    match = _POSITION.fullmatch(text)
    if match:
        return StreamTime(0, Position(int(match[1]), int(match[2]), int(match[3] or 0)), match[3] is None)
    try:
        return StreamTime(moment(text, near_ns))
    except ValueError as error:
        raise BadTime(str(error)) from None
