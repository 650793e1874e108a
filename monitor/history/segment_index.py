"""What is where in a segment: for each frame its moment, its place in the stream and its place in the file.

Reading a moment means reading from the last frame before it that stands on its own: a keyframe, or the first batch of
an engine's life.
"""

from __future__ import annotations

from array import array


class Index:
    """A segment's frames, by number. `wall` and `sequence` are the highest until each, so that they never fall."""

    def __init__(self) -> None:
        self.engine = ""
        self.wall = array("q")
        self.sequence = array("q")
        self.place = array("q")
        """The frame's offset in a journal; in a closed segment, its row."""
        self.anchors: list[int] = []
        """The frames from which the state is known without what came before."""

    def __len__(self) -> int:
        return len(self.wall)

    def add(self, is_keyframe: bool, sequence: int, wall_ns: int, place: int) -> None:
        """One more frame."""
        if is_keyframe or sequence == 0:
            self.anchors.append(len(self.wall))
        self.wall.append(max(wall_ns, self.wall[-1]) if self.wall else wall_ns)
        self.sequence.append(max(sequence, self.sequence[-1]) if self.sequence else sequence)
        self.place.append(place)
