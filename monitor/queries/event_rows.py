"""A story, as it is shown."""

from __future__ import annotations

from kvscope.monitor.analysis.event_history import StoryLine
from kvscope.monitor.schema import EventHistoryEntry
from kvscope.monitor.text import timestamp


def history_entry(line: StoryLine) -> EventHistoryEntry:
    """One line of it."""
    return EventHistoryEntry(timestamp(line.at_ns), line.what, line.text, str(line.position))
