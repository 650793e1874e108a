"""Keeps the stream of one engine: frames as they came, keyframes cut from the ledger among them, points, samples.

Each frame is with the operating system before the ledger has it, so a service that is killed loses nothing that it has
shown. A keyframe opens each segment. The next follows when the events since outweigh it, so that an idle engine with a
large pool costs no more than its events. An engine's own keyframes, which it sends for those who join, are left out.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import Final

from ..contract.event_log import Clock
from ..contract.journal import SUFFIX, JournalWriter
from ..contract.kinds import Kind, Stage
from ..contract.samples import Fact, Observed
from ..contract.wire import ADDED_BY_SOURCE, Batch, Frame, Keyframe, Run, batch_of, encode
from ..ledger.engine_ledger import EngineLedger, Point
from ..ledger.stream_clock import is_next_epoch
from ..sources.live_stream import Received
from .history import GAP_NS
from .segment_files import OpenSegment, closed_segments, encode_note, history_segments, sound_keyframe_of, stem_of
from .segment_readers import Opened

SEGMENT_BYTES: Final = 64 << 20
SEGMENT_S: Final = 600.0
PAGE_SEGMENT_S: Final = 3600.0
"""Length of a segment of an engine without a stream: a week of its samples is read from hundreds of segments, not from
a thousand.
"""
LONGEST_SEGMENT_S: Final = 86_400.0
"""A bound even for an engine that sends next to nothing: retention deletes whole segments."""
OUTWEIGHS: Final = 3
"""Events weigh so many times what the keyframe before them does, before the next is cut."""
BYTES_A_BLOCK: Final = 24
"""In a keyframe: its reference count, its owner, its hash and since when."""
RETRY_NS: Final = 500_000_000
_FOREVER: Final = 1 << 62


class Writer:
    """Writes the history of one engine into `directory`, and calls `closed` with finished segments.

    One thread only, the one that feeds the ledger.
    """

    def __init__(self, directory: Path, done: Callable[[Path], None], clock: Clock = time) -> None:
        self.directory = directory
        self.error = ""
        """Why nothing can be kept just now, such as a full disk."""
        self._done = done
        self._clock = clock
        self._journal: JournalWriter | None = None
        self._size = 0
        self._opened_ns = 0
        self._first = 0
        """In the open segment's name."""
        self._first_batch = -1
        """In the open segment."""
        self._epoch = 0
        self._sequence = ADDED_BY_SOURCE
        """The last batch or keyframe kept."""
        self._keyframe_bytes = 0
        self._keyframe_at = 0
        """Where in the segment the last keyframe ends."""
        self._facts: dict[str, Fact] = {}
        """Facts of an engine without a stream, the latest of each name."""
        self._points_until_ns = -1
        self._retry_ns = 0
        """When to try again to write what could not be written (monotonic)."""
        self._deleted_from = -1
        """The first batch of an open segment that was deleted, until a new segment reports the loss."""
        self.deleted_s = 0.0
        """When that was noticed (monotonic)."""

    @property
    def is_gone(self) -> bool:
        """Whether the open segment was deleted or moved. Any thread."""
        kept = self._journal
        return kept is not None and kept.is_gone

    def keep(self, received: Sequence[Received], ledger: EngineLedger | None) -> None:
        """Keep frames that the ledger is to be fed next. Frames that cannot be written are written when room returns,
        as far as the ledger has them then, and otherwise reported as lost.
        """
        if self._clock.monotonic_ns() < self._retry_ns:
            return
        try:
            self._leave_if_gone()
            self._keep_points(ledger)
            self._end_or_cut(ledger)
            for each in received:
                if not self._adds_events(each.frame, ledger):
                    continue
                if self._journal is None or self._is_next_epoch(each.frame, ledger):
                    self._begin(each.frame.epoch, each.frame.sequence, ledger)
                self._append(each.payload, each.frame)
        except OSError as error:
            self._failed(error)

    def note(self, records: Iterable[Observed]) -> None:
        """Keep what was read from a page, of an engine without a stream."""
        try:
            self._leave_if_gone()
            self._end_or_cut(None)
            for record in records:
                if self._journal is None:
                    self._begin(self._clock.time_ns(), 0, None)
                    for fact in self._facts.values():  # so that the segment stands on its own
                        self._write(encode_note(fact))
                self._write(encode_note(record))
                if isinstance(record, Fact):
                    self._facts[record.name] = record
        except OSError as error:
            self._failed(error)

    def stop(self, ledger: EngineLedger | None) -> None:
        """Keep the last points. The open segment is closed when the service starts again."""
        if self._journal is not None:
            self.keep([], ledger)
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def end(self, ledger: EngineLedger | None) -> None:
        """Keep the last points and end the open segment: the engine is not followed any more."""
        self.keep([], ledger)
        with contextlib.suppress(OSError):
            self._end()

    # ---------------------------------------------------------------- what is kept

    def _adds_events(self, frame: Frame, ledger: EngineLedger | None) -> bool:
        """Whether a frame adds to those before it: a keyframe does where batches are missing before it, or no ledger
        has followed them.
        """
        if not isinstance(frame, Keyframe):
            return True
        in_step = frame.epoch == self._epoch and frame.sequence <= self._sequence
        return not in_step or ledger is None or ledger.state.damaged

    def _is_next_epoch(self, frame: Frame, ledger: EngineLedger | None) -> bool:
        """Whether the ledger begins another epoch with it."""
        if frame.epoch == self._epoch or ledger is None or ledger.epoch == 0:
            return frame.epoch > self._epoch
        return is_next_epoch(frame, self._epoch, ledger.now_ns - ledger.last_received_ns)

    def _append(self, payload: bytes, frame: Frame) -> None:
        self._write(payload)
        self._sequence = max(self._sequence, frame.sequence)
        if self._first_batch < 0 and isinstance(frame, Batch):
            self._first_batch = frame.sequence
        if isinstance(frame, Keyframe):
            self._keyframe_bytes, self._keyframe_at = len(payload), self._size

    def _write(self, payload: bytes) -> None:
        assert self._journal is not None
        self._journal.append(payload, self._first)
        self._size = self._journal.size

    def _keep_points(self, ledger: EngineLedger | None) -> None:
        if ledger is None or not ledger.points:
            return
        if self._points_until_ns < 0:  # what an earlier life of the service has kept
            self._points_until_ns = ledger.points[-1].at_ns if self._journal is None else 0
        if self._journal is None:
            return
        new = list(takewhile(lambda point: point.at_ns > self._points_until_ns, reversed(ledger.points)))
        for point in reversed(new):
            self._write(encode_note(point))
            self._points_until_ns = point.at_ns

    # ---------------------------------------------------------------- segments

    def _end_or_cut(self, ledger: EngineLedger | None) -> None:
        """At the end of what was fed: the only place where the ledger and what is written are equally far."""
        if self._journal is None:
            return
        age_s = (self._clock.monotonic_ns() - self._opened_ns) / 1e9
        segment_s = SEGMENT_S if self._first_batch >= 0 or self._keyframe_at else PAGE_SEGMENT_S
        blocks = ledger.state.total if ledger is not None else 0
        weight = max(self._keyframe_bytes, blocks * BYTES_A_BLOCK)
        outweighed = self._size - self._keyframe_at >= OUTWEIGHS * weight
        if self._size >= SEGMENT_BYTES or (age_s >= segment_s and outweighed) or age_s >= LONGEST_SEGMENT_S:
            self._end()
        elif outweighed and ledger is not None:
            self._cut(ledger)

    def _cut(self, ledger: EngineLedger) -> None:
        keyframe = sound_keyframe_of(ledger)
        if keyframe is not None and (keyframe.epoch, keyframe.sequence) == (self._epoch, self._sequence):
            self._append(encode(keyframe), keyframe)

    def _begin(self, epoch: int, sequence: int, ledger: EngineLedger | None) -> None:
        self._end()
        known = ledger if ledger is not None and ledger.epoch == epoch else None
        keyframe = sound_keyframe_of(known) if known is not None else None
        kept_until = self._sequence if epoch == self._epoch else ADDED_BY_SOURCE
        missing_from = kept_until + 1 if kept_until >= 0 else known.sequence + 1 if known is not None else 0
        if self._deleted_from >= 0:
            missing_from = self._deleted_from
        missing = missing_batches(known, missing_from) if known is not None else []
        self._first = missing_from if missing else max(sequence, 0) if keyframe is None else keyframe.sequence + 1
        taken = {closed.stem for closed in closed_segments(self.directory)}
        while stem_of(epoch, self._first) in taken or self._path_of(epoch).exists():
            self._first += 1  # what has the name holds no batch
        self._journal = JournalWriter(self.directory, epoch, segment_bytes=_FOREVER, segment_s=_FOREVER)
        self._opened_ns = self._clock.monotonic_ns()
        self._epoch, self._sequence, self._first_batch, self._keyframe_at = epoch, kept_until, -1, 0
        if known is not None:
            self._refill(known, missing_from, missing)
        if keyframe is not None:
            self._append(encode(keyframe), keyframe)
        self._deleted_from = -1
        self.error = ""

    def _refill(self, ledger: EngineLedger, missing_from: int, missing: Sequence[Batch]) -> None:
        """Write the batches that are missing, and what is lost of them: those that the ledger has no more."""
        lost_until = missing[0].sequence - 1 if missing else ledger.sequence
        lost_ns = ledger.wall(missing[0].mono_ns) if missing else ledger.last_received_ns
        if missing_from <= lost_until:
            lost = Run(Kind.LOST, 0, -1, [missing_from, lost_until, Stage.JOURNAL], [])
            self._write(encode(batch_of(ledger.engine, ledger.epoch, [lost], wall_ns=lost_ns)))
        for batch in missing:
            self._append(encode(batch), batch)

    def _leave_if_gone(self) -> None:
        """Begin a new segment if the open one is gone, and remember its losses."""
        if self._journal is not None and self._journal.is_gone:
            self._journal.close()
            self._journal = None
            self._deleted_from = self._first_batch
            self.deleted_s = self._clock.monotonic_ns() / 1e9

    def _path_of(self, epoch: int) -> Path:
        return self.directory / f"{stem_of(epoch, self._first)}{SUFFIX}"

    def _end(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
            self._done(self._path_of(self._epoch))

    def _failed(self, error: OSError) -> None:
        self._retry_ns = self._clock.monotonic_ns() + RETRY_NS
        self.error = f"the history cannot be written to {self.directory}: {error.strerror}"
        with contextlib.suppress(OSError):
            self._end()


def add_points(directory: Path, points: Iterable[Point]) -> None:
    """Append `points` to the segment that a killed service left open. Raises OSError.

    Earlier segments have all of theirs, since a segment ends after its points: none of an earlier time is appended.
    """
    last = next(reversed(history_segments(directory)), None)
    if not isinstance(last, OpenSegment):
        return
    opened = Opened(last.path)
    opened.refresh()
    if not len(opened.index):
        return
    os.truncate(last.path, last.path.stat().st_size - opened.bytes_lost)  # what follows half a record is not read
    with contextlib.closing(
        JournalWriter(directory, last.epoch, segment_bytes=_FOREVER, segment_s=_FOREVER)
    ) as journal:
        for point in points:
            if point.at_ns >= opened.index.wall[0] - GAP_NS:
                journal.append(encode_note(point), last.first_sequence)


def missing_batches(ledger: EngineLedger, first: int) -> list[Batch]:
    """Return the batches from `first` on that the ledger has still, in order."""
    newest = islice(reversed(ledger.recent), max(0, ledger.sequence - first + 1))
    return [batch for batch in newest if batch.epoch == ledger.epoch and batch.sequence >= first][::-1]
