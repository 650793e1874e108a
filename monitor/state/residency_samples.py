"""What became of blocks, noted by the books as they change, for whoever counts how long blocks stay.

Columns, since that costs least where blocks come and go; they are counted many at a time. Times are monotonic ns.
"""

from __future__ import annotations


class Stays:
    """Blocks that came into use and went, since this was made. Whoever counts them clears the columns."""

    def __init__(self) -> None:
        # Blocks came into use: so many of them, at.
        self.taken: list[int] = []
        self.taken_ns: list[int] = []
        # They went out of use: since when each had been in use.
        self.used_since: list[int] = []
        # Of these, the contents were kept: of so many, at.
        self.kept: list[int] = []
        self.kept_ns: list[int] = []
        # A prefix hit found the contents of a block that nobody used: idle since, until.
        self.hit_since: list[int] = []
        self.hit_ns: list[int] = []
        # Contents that nobody used were evicted: idle since, until.
        self.evicted_since: list[int] = []
        self.evicted_ns: list[int] = []
        # Contents went, by that or with the last reference: handed out at (0: nobody listened then), until.
        self.born: list[int] = []
        self.died_ns: list[int] = []

    @property
    def size(self) -> int:
        """How much is noted, about."""
        return len(self.taken) + len(self.used_since) + len(self.hit_since) + len(self.evicted_since)

    def clear(self) -> None:
        """All that was noted is counted."""
        for column in vars(self).values():
            column.clear()
