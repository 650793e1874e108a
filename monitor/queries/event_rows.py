"""A story, as it is shown."""

from __future__ import annotations

from kvscope.monitor.analysis.event_history import StoryLine
from kvscope.monitor.schema import StoryView
from kvscope.monitor.text import timestamp


def story_view(line: StoryLine) -> StoryView:
    """One line of it."""
    return StoryView(timestamp(line.at_ns), line.what, line.text, str(line.position))
