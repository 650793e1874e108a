"""The latest samples of an engine, and the selections of them that each judgement reads.

A log of hours is judged at every line of statistics: what each judgement would select anew from thousands of samples is
selected once, as a sample comes.
"""

from __future__ import annotations

from collections import deque
from typing import Self

from ..contract.samples import Sample


class SampleWindow(deque[Sample]):
    """At most `maxlen` samples, oldest first. `append` and `clear` are the only ways in and out."""

    def __init__(self, maxlen: int) -> None:
        super().__init__(maxlen=maxlen)
        self.with_usage: deque[Sample] = deque()
        """Those that have usage and the number of running requests."""
        self.of_log: deque[Sample] = deque()
        """Those that lines of a log gave."""

    def append(self, sample: Sample) -> None:
        """Add the newest. The oldest makes room for it."""
        if len(self) == self.maxlen:
            for chosen in (self.with_usage, self.of_log):
                if chosen and chosen[0] is self[0]:
                    chosen.popleft()
        super().append(sample)
        if sample.usage is not None and sample.running is not None:
            self.with_usage.append(sample)
        if sample.source == "log":
            self.of_log.append(sample)

    def clear(self) -> None:
        """Forget them all: the engine has restarted."""
        super().clear()
        self.with_usage.clear()
        self.of_log.clear()

    def copy(self) -> Self:
        """Return a window of the same samples."""
        made = type(self)(self.maxlen or 0)
        for sample in self:
            made.append(sample)
        return made
