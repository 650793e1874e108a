"""The index of a segment: for each frame its time, its position in the stream and its offset in the file.

Moments are stream time, as a ledger counts it, which goes on where an engine's wall clock is set back.

Reading a moment means reading from the last frame before it that stands on its own: a keyframe, or the first batch of
an engine's life.
"""

from __future__ import annotations

from array import array
from typing import Final

from kvscope.monitor.events.wire import ADDED_BY_SOURCE
from kvscope.monitor.ledger.stream_clock import JUMP_NS, StreamClock

MAX_NS: Final = (1 << 63) - 1


class Index:
    """A segment's frames, by number. `wall` and `sequence` are the highest until each, so that they never fall.

    began_ns: when the first frame was, if not earlier than its own clock shows.
    """

    def __init__(self, began_ns: int = 0) -> None:
        self._began_ns = began_ns
        self.engine = ""
        self._clock = StreamClock()
        self.wall = array("q")
        self.last_wall_ns = 0
        """The last frame's time by the clock of who sent it, however that was set."""
        self.sequence = array("q")
        self.place = array("q")
        """The frame's offset in a journal, or its row in a closed segment."""
        self.anchors: list[int] = []
        """The frames from which the state is known without what came before."""

    def __len__(self) -> int:
        return len(self.wall)

    def add(self, is_keyframe: bool, sequence: int, wall_ns: int, mono_ns: int, place: int) -> None:
        """One more frame."""
        if is_keyframe or sequence == 0:
            self.anchors.append(len(self.wall))
        self.last_wall_ns = wall_ns
        last_ns = self.wall[-1] if self.wall else max(wall_ns, self._began_ns)
        if sequence == ADDED_BY_SOURCE:
            at_ns = self._clock.observed(wall_ns, mono_ns, last_ns)
        else:
            at_ns = self._clock.frame(wall_ns, mono_ns, last_ns, last_ns, (0, sequence))
        self.wall.append(min(max(at_ns, last_ns), MAX_NS))
        self.sequence.append(max(sequence, self.sequence[-1]) if self.sequence else sequence)
        self.place.append(place)

    def begin_no_earlier(self, at_ns: int) -> None:
        """Let the first frame be at `at_ns`, if it would be earlier: of an engine that started again with an earlier
        clock, and whose time goes on from where its predecessor's was.
        """
        by_ns = at_ns - self.wall[0] if self.wall else 0
        if by_ns > JUMP_NS:
            self._clock.move(by_ns)
            self.wall = array("q", [min(wall_ns + by_ns, MAX_NS) for wall_ns in self.wall])
