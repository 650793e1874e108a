"""The latest samples of an engine, and the selections of them that each judgement reads.

A log of hours is judged thousands of times over a window of thousands of samples. What every judgement would select
anew is selected as a sample comes, and a copy is made only for who slices it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Self, SupportsIndex, overload

from ..contract.samples import Sample

MOST_BY_INDEX: Final = 16
"""A longer slice is of a copy of the whole queue, which the next one shares."""


class SampleQueue(deque[Sample]):
    """Different samples, oldest first, which can be sliced. `append`, `popleft` and `clear` are the ways in and out."""

    _copy: tuple[Sample, ...] = ()

    @overload  # type: ignore[override]  # a slice of a deque is an error
    def __getitem__(self, index: SupportsIndex) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Sample, ...]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Sample | tuple[Sample, ...]:
        """Return the sample of an index, or those of a slice."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        wanted = range(*index.indices(len(self)))
        if len(wanted) <= MOST_BY_INDEX:
            return tuple([super(SampleQueue, self).__getitem__(at) for at in wanted])
        copy = self._copy
        if len(copy) != len(self) or copy[0] is not self[0] or copy[-1] is not self[-1]:
            copy = self._copy = tuple(self)
        return copy[index]


class SampleWindow(SampleQueue):
    """At most `maxlen` samples."""

    def __init__(self, maxlen: int) -> None:
        super().__init__(maxlen=maxlen)
        self.with_usage = SampleQueue()
        """Those that have usage and the number of running requests."""
        self.of_log = SampleQueue()
        """Those that lines of a log gave."""
        self.pages_of_log = SampleQueue()
        """Of these, those that count tokens, as the metrics pages in a log do and its statistics do not."""
        self._numbered = 0
        self._around_idle: deque[tuple[int, Sample]] = deque()
        self._was_idle = False

    def append(self, sample: Sample) -> None:
        """Add the newest. The oldest makes room for it."""
        if len(self) == self.maxlen:
            self._forget(self[0])
        super().append(sample)
        if sample.source == "log":
            self.of_log.append(sample)
            if sample.generation_tokens is not None:
                self.pages_of_log.append(sample)
        if sample.usage is not None and sample.running is not None:
            self.with_usage.append(sample)
            is_idle = is_idle_sample(sample)
            if is_idle or self._was_idle:
                self._around_idle.append((self._numbered, sample))
            self._was_idle = is_idle
            self._numbered += 1

    def _forget(self, oldest: Sample) -> None:
        for chosen in (self.with_usage, self.of_log, self.pages_of_log):
            if chosen and chosen[0] is oldest:
                chosen.popleft()
        if self._around_idle and self._around_idle[0][1] is oldest:
            self._around_idle.popleft()

    def around_idle(self) -> Iterator[tuple[int, Sample]]:
        """Yield the samples that show an idle engine, and the first after each that does not. Each comes with its index
        in `with_usage`.
        """
        first = self._numbered - len(self.with_usage)
        return ((number - first, sample) for number, sample in self._around_idle)

    def clear(self) -> None:
        """Forget them all: the engine has restarted."""
        super().clear()
        for chosen in (self.with_usage, self.of_log, self.pages_of_log):
            chosen.clear()
        self._around_idle.clear()
        self._was_idle = False

    def copy(self) -> Self:
        """Return a window of the same samples."""
        made = type(self)(self.maxlen or 0)
        for sample in self:
            made.append(sample)
        return made


def is_idle_sample(sample: Sample) -> bool:
    """Whether no request is in the engine."""
    return not (sample.running or sample.waiting or sample.deferred)
