"""The part of the past to inspect: `--since` and `--until`, each a time or how long ago."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvscope.monitor.errors import BadTarget
from kvscope.monitor.sources.prometheus_history import seconds
from kvscope.monitor.text import moment, timestamp


class Span(NamedTuple):
    """A span in wall ns. `since_ns` is 0 where there is no beginning."""

    since_ns: int
    until_ns: int

    def __str__(self) -> str:
        began, ended = ((timestamp(at) or "its beginning").replace("T", " ") for at in self)
        return f"{began} to {ended}"


class Window(NamedTuple):
    """The window of the command line. Empty texts mean from the beginning, and to the end."""

    since: str = ""
    until: str = ""

    def span(self, end_ns: int) -> Span:
        """Return the span if the last record is at `end_ns`: relative times count back from there.

        Raises BadTarget for a window in which there is no time.
        """
        since_ns = when(self.since, end_ns) if self.since else 0
        until_ns = min(when(self.until, end_ns), end_ns) if self.until else end_ns
        if since_ns >= until_ns:
            backwards = self.until and since_ns >= when(self.until, end_ns)
            why = "--since must be earlier than --until" if backwards else "what there is ends with the second"
            began, ended = timestamp(since_ns) or "the beginning", timestamp(until_ns)
            raise BadTarget(f"from {began} to {ended} there is nothing to look at: {why}")
        return Span(since_ns, until_ns)


ALWAYS: Final = Window()


def when(text: str, end_ns: int) -> int:
    """`30m` before `end_ns`, or a time (kvscope.monitor.text.moment), in wall ns. Raises ValueError for neither."""
    try:
        return end_ns - seconds(text) * 1_000_000_000
    except ValueError:
        pass
    try:
        return moment(text, end_ns)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a time (14:02:11, in UTC, or 2026-01-31T14:02:11Z) nor how long ago (30m, 2h, 1d12h)"
        ) from None
