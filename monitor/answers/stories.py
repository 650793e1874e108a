"""A story, as it is shown."""

from __future__ import annotations

from monitor.ledger.story import StoryLine
from monitor.ledger.words import timestamp
from monitor.views import StoryView


def story_view(line: StoryLine) -> StoryView:
    """One line of it."""
    return StoryView(timestamp(line.at_ns), line.what, line.text, str(line.position))
