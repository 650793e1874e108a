"""The past of engines, as it was kept: the ledger as it was at any moment, points over time, the batches themselves.

It reads what lies on disk, while a service goes on writing it or long after: a service's history, a recording, or an
engine's own journal. A query for a past time replays from the last keyframe before it.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from ..base.errors import KvscopeError
from ..base.latest_entries import LatestEntries
from ..base.text import timestamp
from ..contract import journal
from ..contract.samples import OBSERVED_LETTERS, Fact, Observed
from ..contract.wire import Batch, Frame, Keyframe
from ..ledger.engine_ledger import EngineLedger, Point, Position
from ..ledger.partial_replay import first_events, observed
from .segment_files import (
    LETTER_OF_POINTS,
    ClosedSegment,
    HistorySegment,
    Index,
    directory_of,
    engine_in,
    history_segments,
    sound_keyframe_of,
)
from .segment_readers import DamagedSegments, SegmentReader

GAP_NS: Final = 5_000_000_000
"""Readers of a stream note every second what they received, if only nothing: a longer pause is a gap."""
MAX_KEPT_LEDGERS: Final = 8
MAX_CUTS: Final = 32
MAX_READERS: Final = 64
_NO_END: Final = 1 << 62

SegmentT = TypeVar("SegmentT")


class NotKept(KvscopeError, LookupError):
    """The requested data was not kept, or has been deleted. The message names the span that exists."""


class Gap(NamedTuple):
    """A time without a reader, or whose data was lost (wall ns)."""

    from_ns: int
    to_ns: int
    bytes_lost: int
    """Bytes that a crash or damage has cut off there, 0 without a reader."""


class KeptEpoch(NamedTuple):
    """One life of an engine, as far as it was kept (wall ns)."""

    epoch: int
    from_ns: int
    to_ns: int


class KeptSpan(NamedTuple):
    """The time span of an engine's history (wall ns), with its epochs and gaps."""

    from_ns: int
    to_ns: int
    kept_epochs: list[KeptEpoch]
    gaps: list[Gap]


class _Place(NamedTuple):
    """Before the `row`-th frame of the segment of that life that begins with that batch."""

    epoch: int
    first_sequence: int
    row: int


class History:
    """The history under `directory`: a service's (a directory for each engine), or one recording.

    Only reads. Thread-safe. Callers share its results with others who ask for the same time: never apply to them.
    Raises NotAJournal if nothing of ours is there.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._readers: LatestEntries[Path, SegmentReader] = LatestEntries(MAX_READERS)
        self._ledgers: LatestEntries[tuple[str, str], tuple[_Place, EngineLedger]] = LatestEntries(MAX_KEPT_LEDGERS)
        self._cuts: LatestEntries[tuple[str, _Place], Keyframe] = LatestEntries(MAX_CUTS)
        self._point_times: dict[Path, array[int]] = {}
        """Point times of closed segments."""
        self._damage: DamagedSegments = {}
        self._recorded = ""
        if not directory.is_dir():
            raise journal.NotAJournal(f"{directory} is not a directory, neither a recording nor a service's history")
        self._is_recording = bool(history_segments(directory))

    def engines(self) -> list[str]:
        """Whose past is kept, by name."""
        if self._is_recording:
            return [self._engine_recorded()]
        return sorted(engine_in(path) for path in self.directory.iterdir() if path.is_dir() and history_segments(path))

    def span(self, engine: str) -> KeptSpan | None:
        """Return the span for which `engine` has history, or None if it has none that stands on its own."""
        kept_epochs: list[KeptEpoch] = []
        gaps: list[Gap] = []
        lost = 0
        for segment in chain.from_iterable(self._time_runs(self._segments(engine))):
            between = self._between(segment, first=not kept_epochs)
            if between is None:
                continue
            from_ns, to_ns = between
            if kept_epochs and (lost or from_ns - kept_epochs[-1].to_ns > GAP_NS):
                gaps.append(Gap(kept_epochs[-1].to_ns, from_ns, lost))
            if kept_epochs and kept_epochs[-1].epoch == segment.epoch:
                kept_epochs[-1] = kept_epochs[-1]._replace(to_ns=max(to_ns, kept_epochs[-1].to_ns))
            else:
                kept_epochs.append(KeptEpoch(segment.epoch, from_ns, to_ns))
            lost = 0 if isinstance(segment, ClosedSegment) else self._open(segment).bytes_lost
            if segment.path in self._damage:
                gaps.append(Gap(from_ns, to_ns, self._damage[segment.path]))
        if not kept_epochs:
            return None
        if lost:
            gaps.append(Gap(kept_epochs[-1].to_ns, kept_epochs[-1].to_ns, lost))
        from_ns, to_ns = min(each.from_ns for each in kept_epochs), max(each.to_ns for each in kept_epochs)
        return KeptSpan(from_ns, to_ns, kept_epochs, gaps)

    def ledger_at(self, engine: str, at_ns: int) -> EngineLedger:
        """Return the ledger as it was at `at_ns` (wall): all batches packed by then. Its `points` (one a second),
        `recent`, `ended` and all else that it only keeps for a while begin at the keyframe before. Raises NotKept.
        """
        return self._ledger(engine, str(at_ns), _Until(at_ns=at_ns))

    def ledger_at_position(self, engine: str, position: Position) -> EngineLedger:
        """Return the ledger just after that event. Raises NotKept."""
        return self._ledger(engine, str(position), _Until(position=position))

    def points(self, engine: str, from_ns: int, to_ns: int, most: int = 600) -> list[Point]:
        """Return the pool and the queues from `from_ns` to `to_ns` (wall), at most `most` points, evenly thinned: those
        that the service kept, or those that the batches of another writer add up to.
        """
        kept = list(self._kept_points(engine, from_ns, to_ns))
        count = sum(len(rows) for _, rows in kept)
        if not count:
            return thinned(list(self._folded_points(engine, from_ns, to_ns)), most)
        # Thinned before they are read: a week has millions.
        stride = _stride(count, most)
        first = (count - 1) % stride
        points: list[Point] = []
        for reader, rows in kept:
            points += reader.points(rows[first::stride])
            first = (first - len(rows)) % stride
        return points

    def last_point_ns(self, engine: str, from_ns: int) -> int:
        """Return when the last point since `from_ns` was that the service kept (wall ns), or 0 without any."""
        kept = self._kept_points(engine, from_ns, _NO_END)
        return max((reader.point_times[rows[-1]] for reader, rows in kept if rows), default=0)

    def last_ns(self, engine: str) -> int:
        """Return when `engine` was last received, or its page last read (wall ns), or 0 without history."""
        last = 0
        for reader in filter(None, map(self._last_reader, self._time_runs(self._segments(engine)))):
            last = max((last, *reader.index.wall[-1:], *(note.at_ns for note in reader.kept_notes())))
        return last

    def last_wall_ns(self, engine: str) -> int:
        """Return the same by the clock that was stored with it, or 0 if never."""
        runs = self._time_runs(self._segments(engine))
        reader = self._last_reader(runs[-1]) if runs else None
        if reader is None:
            return 0
        return reader.index.last_wall_ns or max((note.at_ns for note in reader.kept_notes()), default=0)

    def _last_reader(self, run: list[HistorySegment]) -> SegmentReader | None:
        """Return the last segment of a run that holds anything: a service may be killed as it begins one."""
        for segment in reversed(run):
            reader = self._open(segment)
            if len(reader.index) or any(True for _ in reader.kept_notes()):
                return reader
        return None

    def tail(self, engine: str, since_ns: int) -> Iterator[Frame]:
        """Yield the frames from `since_ns` (wall) on, and those before from the last one that stands on its own."""
        for _, frame in self._frames(engine, since_ns, _NO_END, from_anchor=True):
            yield frame

    def batches(self, engine: str, from_ns: int, to_ns: int) -> Iterator[Batch]:
        """Yield the batches packed from `from_ns` to `to_ns` (wall), with those that sources added, in order."""
        for wall_ns, frame in self._frames(engine, from_ns, to_ns):
            if isinstance(frame, Batch) and wall_ns >= from_ns:
                yield frame

    def notes(self, engine: str, from_ns: int, to_ns: int) -> Iterator[Observed]:
        """Yield the samples and facts of an engine without a stream, from `from_ns` to `to_ns` (wall), in order."""
        for segment in self._within(engine, from_ns, to_ns):
            for each in self._open(segment).kept_notes():
                is_asked = each.letter != LETTER_OF_POINTS and from_ns <= each.at_ns <= to_ns
                if is_asked and isinstance(note := each.note(), Observed):
                    yield note

    def facts(self, engine: str) -> list[Fact]:
        """Return the facts of an engine without a stream: each of its segments begins with all that were known."""
        for reader in self.readers(engine):
            notes = [each.note() for each in reader.kept_notes() if each.letter == OBSERVED_LETTERS[Fact]]
            if notes:
                return [note for note in notes if isinstance(note, Fact)]
        return []

    def readers(self, engine: str, from_ns: int = 0, to_ns: int = _NO_END) -> Iterator[SegmentReader]:
        """Return the segments of that time (wall), the latest first."""
        return map(self._open, reversed(self._within(engine, from_ns, to_ns)))

    def _folded_points(self, engine: str, from_ns: int, to_ns: int) -> Iterator[Point]:
        ledgers: list[EngineLedger] = []
        for at_ns, frame in self._frames(engine, from_ns, to_ns, from_anchor=True):
            if not ledgers or frame.epoch != ledgers[-1].epoch:
                ledgers.append(EngineLedger(engine))
                ledgers[-1].now_ns = ledgers[-1].last_received_ns = at_ns
            ledgers[-1].apply(frame)
        for ledger in ledgers:
            yield from (point for point in ledger.points if from_ns <= point.at_ns <= to_ns)

    def _kept_points(self, engine: str, from_ns: int, to_ns: int) -> Iterator[tuple[SegmentReader, range]]:
        """Which points were kept of that time: where they are read, and which of those there."""
        found = list(chain.from_iterable(self._time_runs(self._segments(engine))))
        known = {segment.path: self._point_times.get(segment.path) for segment in found}
        self._point_times = {path: times for path, times in known.items() if times is not None}
        for segment in found:
            if isinstance(segment, ClosedSegment) and not (segment.from_ns <= to_ns and from_ns <= segment.to_ns):
                continue
            # A closed one needs nothing else, so it takes no other reader's place.
            reader = SegmentReader(segment, self._damage) if isinstance(segment, ClosedSegment) else self._open(segment)
            times = self._point_times.get(segment.path)
            if times is None:
                times = reader.point_times
                if isinstance(segment, ClosedSegment):
                    self._point_times[segment.path] = times
            yield reader, range(bisect_left(times, from_ns), bisect_right(times, to_ns))

    def _within(self, engine: str, from_ns: int, to_ns: int) -> list[HistorySegment]:
        """Return the segments that may have something of that time, in order. An open one may have any time."""
        return [
            segment
            for segment in self._segments(engine)
            if not isinstance(segment, ClosedSegment) or (segment.from_ns <= to_ns and from_ns <= segment.to_ns)
        ]

    def _segments(self, engine: str) -> list[HistorySegment]:
        if not self._is_recording:
            return history_segments(directory_of(self.directory, engine))
        return history_segments(self.directory) if engine == self._engine_recorded() else []

    def _engine_recorded(self) -> str:
        for segment in history_segments(self.directory) if not self._recorded else ():
            self._recorded = self._recorded or self._open(segment).index.engine
        return self._recorded

    def _open(self, segment: HistorySegment) -> SegmentReader:
        """Its reader, with all that is in it now."""
        with self._lock:
            reader = self._readers.get(segment.path) or SegmentReader(segment, self._damage)
            reader.refresh()
            self._readers[segment.path] = reader
            return reader

    def _between(self, segment: HistorySegment, first: bool) -> tuple[int, int] | None:
        """Return its first and last time, for the first one from the first frame that stands on its own."""
        if isinstance(segment, ClosedSegment) and not first:
            return segment.from_ns, segment.to_ns
        index = self._open(segment).index
        if not len(index) or (first and not index.anchors):
            return None
        return index.wall[index.anchors[0] if first else 0], index.wall[-1]

    def _frames(self, engine: str, from_ns: int, to_ns: int, from_anchor: bool = False) -> Iterator[tuple[int, Frame]]:
        """Frames with their moments until `to_ns`: from `from_ns` on, or from the last before it that stands alone."""
        runs = self._time_runs(self._segments(engine))
        spans = [self._span_of_run(run) for run in runs]
        within = [run for run, (start, end) in zip(runs, spans, strict=True) if start <= to_ns and end >= from_ns]
        for run in within or self._latest_run(runs, from_ns):
            yield from self._frames_of_run(run, from_ns, to_ns, from_anchor)

    def _frames_of_run(
        self, found: list[HistorySegment], from_ns: int, to_ns: int, from_anchor: bool
    ) -> Iterator[tuple[int, Frame]]:
        start = row = 0
        for i, segment in reversed(list(enumerate(found))):
            if isinstance(segment, ClosedSegment) and segment.from_ns >= from_ns:
                continue
            index = self._open(segment).index
            before = bisect_left(index.wall, from_ns)
            anchors = index.anchors[: bisect_right(index.anchors, before)] if from_anchor else [before]
            if before and anchors:
                start, row = i, anchors[-1]
                break
        for segment in found[start:]:
            if isinstance(segment, ClosedSegment) and segment.from_ns > to_ns:
                continue
            walls = self._open(segment).index.wall
            for number, frame in self._open(segment).frames(row, bisect_right(walls, to_ns)):
                yield walls[number], frame
            row = 0

    # ---------------------------------------------------------------- clocks that were set back

    def _time_runs(self, found: list[HistorySegment]) -> list[list[HistorySegment]]:
        """Segments in runs in which time only goes on, in time's order: as a rule, there is one. Where the clock of an
        engine, or of a service that started again, was set back, another begins.
        """
        runs: list[list[HistorySegment]] = []
        until_ns = 0
        for segment in found:
            from_ns, to_ns = self._between(segment, first=False) or (until_ns, until_ns)
            if runs and from_ns >= until_ns - GAP_NS:
                runs[-1].append(segment)
            else:
                runs.append([segment])
            until_ns = to_ns
        return sorted(runs, key=self._span_of_run) if len(runs) > 1 else runs

    def _span_of_run(self, run: list[HistorySegment]) -> tuple[int, int]:
        spans = [between for segment in run if (between := self._between(segment, first=False))]
        return (spans[0][0], spans[-1][1]) if spans else (0, 0)

    def _latest_run(self, runs: list[list[HistorySegment]], at_ns: int) -> list[list[HistorySegment]]:
        """Return the run of that time, or else the last one before it, or nothing if all are later."""
        before = [run for run in runs if self._span_of_run(run)[0] <= at_ns]
        return [max(reversed(before), key=lambda run: min(self._span_of_run(run)[1], at_ns))] if before else []

    # ---------------------------------------------------------------- the ledger as it was

    def _ledger(self, engine: str, asked: str, until: _Until) -> EngineLedger:
        found = self._segments(engine)
        run = self._latest_run(self._time_runs(found), until.at_ns)[:1] if until.position is None else []
        plan = (self._plan(run[0], until) if run else []) or self._plan(found, until)
        if not plan:
            raise NotKept(self._not_kept(engine, until))
        begin = _Place(*plan[0].segment[:2], plan[0].first)
        end = _Place(*plan[-1].segment[:2], plan[-1].end)
        with self._lock:
            known = self._ledgers.get((engine, asked))
            if known is not None and known[0] == end:
                self._ledgers.move_to_end((engine, asked))
                return known[1]
            cut = max((place for name, place in self._cuts if name == engine and begin < place <= end), default=None)
            keyframe = self._cuts[engine, cut] if cut is not None else None
        ledger = EngineLedger(engine, counting=False)
        ledger.now_ns = ledger.last_received_ns = self._began_ns(plan[0])
        if keyframe is not None:
            ledger.apply(keyframe)
        for segment, first, rows in plan:
            skipped = cut is not None and cut > (*segment[:2], first)
            if skipped and cut is not None:
                first = cut.row if cut[:2] == segment[:2] else rows
            for _, frame in self._open(segment).frames(first, rows):
                ledger.apply(until.part_of(frame))
        if until.position is None:  # a record of a source's, so that ages are those of that moment
            ledger.apply(observed(engine, ledger.epoch, until.at_ns))
        self._remember(engine, asked, end, ledger, whole=until.position is None)
        return ledger

    def _began_ns(self, part: _Part) -> int:
        """When it began, in stream time, which the engine's wall clock may be behind."""
        walls = self._open(part.segment).index.wall
        return walls[part.first] if part.first < len(walls) else 0

    def _plan(self, found: list[HistorySegment], until: _Until) -> list[_Part]:
        """Return the parts to read: from the last frame that stands on its own up to the end, segment by segment."""
        for keyframes in (False, True):  # of the position asked for: a last resort, since they have all of its batch
            plan: list[_Part] = []
            for segment in reversed(found):
                if until.is_before(segment):
                    continue
                index = self._open(segment).index
                rows = until.rows(segment.epoch, index, keyframes)
                anchor = bisect_left(index.anchors, rows) - 1
                if rows:
                    plan.append(_Part(segment, index.anchors[anchor] if anchor >= 0 else 0, rows))
                if anchor >= 0:
                    return plan[::-1]
        return []

    def _remember(self, engine: str, asked: str, end: _Place, ledger: EngineLedger, whole: bool) -> None:
        """Keep the ledger of one query, which usually precedes a query for a later time."""
        cut = sound_keyframe_of(ledger) if whole else None
        with self._lock:
            self._ledgers[engine, asked] = end, ledger
            if cut is not None:
                self._cuts[engine, end] = cut

    def _not_kept(self, engine: str, until: _Until) -> str:
        span = self.span(engine)
        if span is None:
            return f"nothing is kept of {engine!r}; of these there is something: {', '.join(self.engines()) or 'none'}"
        since, to = timestamp(span.from_ns), timestamp(span.to_ns)
        what = f"position {until.position}" if until.position else timestamp(until.at_ns)
        return f"{what} is not kept of {engine}: what is begins at {since} and ends at {to}"


class _Part(NamedTuple):
    """Frames of a segment: from `first` up to, not including, `end`."""

    segment: HistorySegment
    first: int
    end: int


class _Until(NamedTuple):
    """How far to read: to a moment, or to a position and all that is before it."""

    at_ns: int = 0
    position: Position | None = None

    def is_before(self, segment: HistorySegment) -> bool:
        """Whether all of a segment is later, by its name."""
        if self.position is not None:
            return segment[:2] > (self.position.epoch, self.position.sequence + 1)
        return isinstance(segment, ClosedSegment) and segment.from_ns > self.at_ns

    def rows(self, epoch: int, index: Index, keyframes: bool) -> int:
        """How many of a segment's frames are within."""
        if self.position is None:
            return bisect_right(index.wall, self.at_ns)
        if epoch != self.position.epoch:
            return len(index) if epoch < self.position.epoch else 0
        row = bisect_left(index.sequence, self.position.sequence)
        is_there = row < len(index) and index.sequence[row] == self.position.sequence
        is_keyframe = is_there and self.position.sequence > 0 and row in index.anchors
        return row + (is_there and (keyframes or not is_keyframe))

    def part_of(self, frame: Frame) -> Frame:
        """Return the frame, or the part of it that comes no later than the position."""
        if self.position and isinstance(frame, Batch) and (frame.epoch, frame.sequence) == self.position[:2]:
            return first_events(frame, self.position.event + 1)
        return frame


def thinned(points: list[SegmentT], most: int) -> list[SegmentT]:
    """At most `most` of them, evenly, the last among them."""
    stride = _stride(len(points), most)
    return points[(len(points) - 1) % stride :: stride]


def _stride(count: int, most: int) -> int:
    return max(1, -(-count // max(1, most)))


# -------------------------------------------------------------------- several recordings


BETWEEN: Final = ": "
"""A recording's name and its engine's. Ranks of one server are known by the engine's, so it stands last."""


class Recordings(History):
    """The recordings in `directories`, at least one: the engine of each is here `DIRECTORY: ENGINE`.

    Raises NotAJournal where one is not a directory.
    """

    def __init__(self, directories: Sequence[Path]) -> None:
        super().__init__(directories[0])
        alike = len({directory.name for directory in directories}) < len(directories)
        self.named: dict[str, Path] = {}
        """The directories by the names of their engines here, in order."""
        for directory in directories:
            engine = next(iter(History(directory).engines()), "")
            self.named[f"{directory if alike else directory.name}{BETWEEN}{engine}"] = directory

    def engines(self) -> list[str]:
        """Whose past is kept, by name."""
        return sorted(self.named)

    def _segments(self, engine: str) -> list[HistorySegment]:
        return history_segments(self.named[engine]) if engine in self.named else []
