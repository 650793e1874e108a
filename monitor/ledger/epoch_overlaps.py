"""Signs that several processes, or several sources, speak for one engine.

An engine's name and epoch should come from one process and by one way. Two processes under one name show as heartbeats
of an epoch that is not the current one while the current one is alive. Two sources of one process show as heartbeats
that come again, though they are recent.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from kvscope.monitor.events.wire import Batch, Keyframe, is_alive

EPOCH_SILENT_NS: Final = 3_000_000_000
"""An epoch without heartbeats for that long may be followed by one with an earlier clock."""
RECENT_NS: Final = 15_000_000_000
"""Signs older than that are over."""
FRESH_NS: Final = 5_000_000_000
"""A heartbeat that comes again and is older than that is of a replay, which repeats what it must."""
ENOUGH: Final = 5
"""So many heartbeats make a sign, a second apart: a restart or a reader that joins brings fewer."""
MAX_SIGNS: Final = 64


def is_next_epoch(frame: Batch | Keyframe, epoch: int, silent_ns: int) -> bool:
    """Return whether a frame of another epoch than `epoch`, which has been silent for `silent_ns`, begins the next one.
    Epochs are named by the wall clock at the engine's start, so a later one does. An earlier one does if this one is
    silent and the frame shows a live engine.
    """
    return frame.epoch > epoch or (silent_ns >= EPOCH_SILENT_NS and is_alive(frame))


class EpochOverlaps:
    """The signs of the recent past, in stream time."""

    def __init__(self) -> None:
        self._others: deque[tuple[int, int]] = deque(maxlen=MAX_SIGNS)
        """When a heartbeat of another epoch came, and of which."""
        self._repeats: deque[int] = deque(maxlen=MAX_SIGNS)

    def note_other(self, frame: Batch | Keyframe, now_ns: int) -> None:
        """Note a frame of a live epoch that is not the current one."""
        if isinstance(frame, Batch) and is_alive(frame):
            self._others.append((now_ns, frame.epoch))

    def note_repeat(self, batch: Batch, now_ns: int, offset_ns: int) -> None:
        """Note a batch of the current epoch that came before."""
        if batch.mono_ns + offset_ns >= now_ns - FRESH_NS and is_alive(batch):
            self._repeats.append(now_ns)

    def other_epochs(self, now_ns: int) -> tuple[int, list[int]]:
        """Return since when other epochs are alive (0: none is), and which, the last first."""
        recent = [sign for sign in self._others if sign[0] >= now_ns - RECENT_NS]
        if len(recent) < ENOUGH:
            return 0, []
        return recent[0][0], list(dict.fromkeys(epoch for _, epoch in reversed(recent)))

    def repeats(self, now_ns: int) -> tuple[int, int]:
        """Return since when heartbeats come again (0: they do not), and how many did."""
        recent = [at_ns for at_ns in self._repeats if at_ns >= now_ns - RECENT_NS]
        return (recent[0], len(recent)) if len(recent) >= ENOUGH else (0, 0)
