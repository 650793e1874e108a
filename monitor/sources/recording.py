"""A recording: a journal directory, or one segment of it. Gives the frames that were kept, in order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvscope.monitor.events import journal
from kvscope.monitor.events.wire import Batch, Frame, Keyframe, NewerVersion, NotAFrame, decode


class Recording:
    """The frames under `path`; what could not be read is counted in `bad_frames` and `bytes_lost`.

    Raises journal.NotAJournal if there is nothing of ours at `path`.
    """

    def __init__(self, path: Path) -> None:
        self.bad_frames = 0
        self.bytes_lost = 0
        self.segments = journal.segments(path) if path.is_dir() else []
        self._files = [segment.path for segment in self.segments] or [path]
        if path.is_dir() and not self.segments:
            raise journal.NotAJournal(
                f"{path} holds no recording: no file in it is named EPOCH-SEQUENCE{journal.SUFFIX}"
            )

    def __iter__(self) -> Iterator[Frame]:
        """The frames, but for a keyframe that stands before the beginning of the very life that it is of: the batches
        say all that it does, and how it came about. Raises NewerVersion if the recording is of a version that this
        release cannot read.
        """
        held: Keyframe | None = None
        for frame in self._frames():
            if held is not None and not (isinstance(frame, Batch) and (frame.epoch, frame.sequence) == (held.epoch, 0)):
                yield held
            held = frame if isinstance(frame, Keyframe) else None
            if held is None:
                yield frame
        if held is not None:
            yield held

    def _frames(self) -> Iterator[Frame]:
        for file in self._files:
            for payload in journal.read_segment(file):
                try:
                    frame = decode(payload)
                except NewerVersion:
                    raise
                except NotAFrame:
                    self.bad_frames += 1
                    continue
                if frame is not None:
                    yield frame
            self.bytes_lost += journal.tail_lost(file)
