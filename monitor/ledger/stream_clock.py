"""The time of an engine's stream, and signs that several processes or sources speak for one engine.

A wall clock may jump either way (NTP, a resumed VM, a wrong time zone at boot), and judgement must not: so stream time
is the engine's monotonic clock plus an offset, which follows the wall clock by at most SLEW. That is enough for any
drift that NTP allows, and a jump changes nothing but the count of jumps. How long an engine has been silent is measured
on the reader's monotonic clock, which the source stores with each OBSERVED record.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from ..contract.wire import Batch, Keyframe, is_alive

SLEW: Final = 0.001
"""NTP slews by 0.0005 at most."""
JUMP_NS: Final = 2_000_000_000
"""A difference beyond that between wall and monotonic clock, from one frame to the next, is a jump."""
MAX_JUMPS: Final = 100


class ClockJump(NamedTuple):
    """The engine's wall clock moved by `by_ns` at stream time `at_ns`, between two frames."""

    at_ns: int
    by_ns: int
    epoch: int
    sequence: int


class StreamClock:
    """Stream time of one engine. It never goes back, whatever its engines and readers do to their clocks."""

    def __init__(self) -> None:
        self.offset_ns = 0
        """Stream time less the engine's monotonic time."""
        self.jumps: deque[ClockJump] = deque(maxlen=MAX_JUMPS)
        self._anchored = False
        self._difference_ns = 0
        """The wall clock less the monotonic clock, as of the last frame."""
        self._mono_ns = 0
        self._reader_ns: int | None = None
        """Stream time less the reader's monotonic time."""
        self._observed_ns = 0
        self._fresh = False
        """Whether a frame came since the reader's clock was last stored."""

    def begin_epoch(self) -> None:
        """Expect the clocks of another process."""
        self._anchored = False

    def move(self, by_ns: int) -> None:
        """Move stream time forward."""
        self.offset_ns += by_ns
        if self._reader_ns is not None:
            self._reader_ns += by_ns

    def frame(self, wall_ns: int, mono_ns: int, now_ns: int, last_received_ns: int, place: tuple[int, int]) -> int:
        """Return the stream time of a frame at `place`, its epoch and sequence.

        now_ns, last_received_ns: the latest stream time, and that of the last frame.
        """
        difference = wall_ns - mono_ns
        self._fresh = True
        if not self._anchored or mono_ns <= 0:
            # An engine that restarts with an earlier clock: its time goes on from where its predecessor's was.
            self.offset_ns = difference if wall_ns >= last_received_ns else now_ns - mono_ns
            self._anchored, self._difference_ns, self._mono_ns = True, difference, mono_ns
            return mono_ns + self.offset_ns
        jumped = difference - self._difference_ns
        if abs(jumped) > JUMP_NS:
            self.jumps.append(ClockJump(now_ns, jumped, *place))
        self._difference_ns = difference
        allowed = round(max(0, mono_ns - self._mono_ns) * SLEW)
        self.offset_ns += max(-allowed, min(allowed, difference - self.offset_ns))
        self._mono_ns = max(self._mono_ns, mono_ns)
        suspended = now_ns - (mono_ns + self.offset_ns)
        if suspended > JUMP_NS and difference - self.offset_ns > JUMP_NS:
            # The reader saw time pass that the engine's monotonic clock did not count: its machine was suspended.
            self.offset_ns += min(suspended, difference - self.offset_ns)
        return mono_ns + self.offset_ns

    def observed(self, wall_ns: int, mono_ns: int, now_ns: int) -> int:
        """Return the stream time at which the reader stored its clocks. mono_ns 0: it stored its wall clock alone."""
        if mono_ns <= 0:
            return wall_ns
        same_clock = abs(wall_ns - now_ns) <= JUMP_NS
        if self._reader_ns is None or mono_ns < self._observed_ns:  # another reader, or another boot of its machine
            self._reader_ns = (wall_ns if same_clock else now_ns) - mono_ns
        elif self._fresh:  # `now_ns` may be of a frame that is up to a second old, and is no later than this moment
            decayed = self._reader_ns - round((mono_ns - self._observed_ns) * SLEW)
            self._reader_ns = max(decayed, now_ns - mono_ns)
        self._observed_ns, self._fresh = mono_ns, False
        return mono_ns + self._reader_ns


EPOCH_SILENT_NS: Final = 3_000_000_000
"""An epoch without heartbeats for that long may be followed by one with an earlier clock."""
RECENT_NS: Final = 15_000_000_000
"""Signs older than that are over."""
FRESH_NS: Final = 5_000_000_000
"""An older heartbeat that repeats is part of a replay."""
ENOUGH: Final = 5
"""Heartbeats, a second apart, that make a sign: a restart or a reader that joins brings fewer."""
MAX_SIGNS: Final = 64


def is_next_epoch(frame: Batch | Keyframe, epoch: int, silent_ns: int) -> bool:
    """Return whether a frame of another epoch than `epoch`, which has been silent for `silent_ns`, begins the next one.
    Epochs are named by the wall clock at the engine's start, so a later one does. An earlier one does if this one is
    silent and the frame shows a live engine.
    """
    return frame.epoch > epoch or (silent_ns >= EPOCH_SILENT_NS and is_alive(frame))


class EpochOverlaps:
    """Recent signs, in stream time, that several processes or sources speak for one engine.

    Two processes under one name show as heartbeats of another epoch while the current one is alive. Two sources of one
    process show as heartbeats that repeat although they are recent.
    """

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
        """Return when the first sign of another live epoch came (0: none did), and the epochs, latest first."""
        recent = [sign for sign in self._others if sign[0] >= now_ns - RECENT_NS]
        if len(recent) < ENOUGH:
            return 0, []
        return recent[0][0], list(dict.fromkeys(epoch for _, epoch in reversed(recent)))

    def repeats(self, now_ns: int) -> tuple[int, int]:
        """Return when heartbeats began to repeat (0: they do not), and how many did."""
        recent = [at_ns for at_ns in self._repeats if at_ns >= now_ns - RECENT_NS]
        return (recent[0], len(recent)) if len(recent) >= ENOUGH else (0, 0)
