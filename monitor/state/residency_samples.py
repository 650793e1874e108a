"""Residency samples: when blocks came into use, were reused, evicted and freed.

Columns are the cheapest form in the hot loop, and the reader counts many samples at a time. Times are monotonic ns.
"""

from __future__ import annotations


class ResidencySamples:
    """Transitions of blocks since the columns were last cleared. The reader that counts them clears them."""

    def __init__(self) -> None:
        # Blocks came into use: their number, and when.
        self.taken: list[int] = []
        self.taken_ns: list[int] = []
        # Blocks went out of use: since when each had been in use.
        self.used_since: list[int] = []
        # Blocks of these whose content stayed cached: their number, and when.
        self.kept: list[int] = []
        self.kept_ns: list[int] = []
        # A prefix hit on a cached-idle block: idle since, until.
        self.hit_since: list[int] = []
        self.hit_ns: list[int] = []
        # The content of a cached-idle block was evicted: idle since, until.
        self.evicted_since: list[int] = []
        self.evicted_ns: list[int] = []
        # Content was lost, by eviction or with the last reference: allocated at (0: before the first event), until.
        self.born: list[int] = []
        self.died_ns: list[int] = []

    @property
    def size(self) -> int:
        """The approximate number of samples."""
        return len(self.taken) + len(self.used_since) + len(self.hit_since) + len(self.evicted_since)

    def clear(self) -> None:
        """Drop all samples."""
        for column in vars(self).values():
            column.clear()
