"""An event history, formatted for display."""

from __future__ import annotations

from kvscope.monitor.analysis.event_history import HistoryLine
from kvscope.monitor.schema import EventHistoryEntry
from kvscope.monitor.text import timestamp


def history_entry(line: HistoryLine) -> EventHistoryEntry:
    """One line of it."""
    return EventHistoryEntry(timestamp(line.at_ns), line.what, line.text, str(line.position))
