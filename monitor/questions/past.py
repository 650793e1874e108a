"""The engines of a watch, now and at any past time: from memory, from history on disk, or from what a server has kept.

Names and texts of a question become ledgers and times here.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, takewhile
from typing import Final, NamedTuple, TypeVar

from ..base.errors import BadQuestion, NotKnown
from ..base.latest_entries import LatestEntries
from ..base.text import clock_time, timestamp
from ..contract.samples import Record, Sample
from ..contract.wire import ADDED_BY_SOURCE, Batch, Frame
from ..history.history import History, NotKept
from ..history.segment_files import keyframe_of
from ..ledger.engine_ledger import MAX_POINTS, POINT_EVERY_NS, EngineLedger, Fleet, Point
from ..ledger.partial_replay import fork
from ..ledger.prefix_tree import PrefixCacheView, Prefixes, by_branch, prefixes
from .availability import require
from .recent_past import Recent, StreamTime, parse_stream_time, size_of
from .schema import EpochView, GapView, HistoryView

ReadStored = Callable[[str, int, int], list[Sample]]
"""Engine, from, to (wall ns): its samples in order. Raises NotKnown where the server does not answer."""

MOST_BACK_NS: Final = 366 * 86_400 * 10**9
"""No window begins earlier than this before its end: no server keeps more by default."""
WINDOW_PARTS: Final = 600
"""A window is queried in whole parts of it, so that one that moves on with time causes few queries."""
LEAST_PART_NS: Final = 60 * 10**9
KEPT_WINDOWS: Final = 16


def _none_stored(_engine: str, _since_ns: int, _until_ns: int) -> list[Sample]:
    return []


class StoredPast:
    """Samples by window, the last ones kept: what is past does not change. Thread-safe."""

    def __init__(self, read: ReadStored = _none_stored) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._kept: LatestEntries[tuple[str, int, int], list[Sample]] = LatestEntries(KEPT_WINDOWS)

    def samples(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return the samples from one time until before another (wall ns). Raises NotKnown."""
        if self._read is _none_stored or since_ns >= until_ns:
            return []
        since_ns = max(since_ns, until_ns - MOST_BACK_NS)
        part_ns = max((until_ns - since_ns) // WINDOW_PARTS, LEAST_PART_NS)
        whole = engine, since_ns // part_ns * part_ns, -(-until_ns // part_ns) * part_ns
        with self._lock:
            found = self._kept.get(whole)
        if found is None:
            found = self._read(*whole)
            with self._lock:
                self._kept[whole] = found
        return [one for one in found if since_ns <= (one.at_ns or 0) < until_ns]

    def first_ns(self, engine: str, known_ns: int) -> int:
        """Return when what the server keeps begins (wall), or `known_ns` if it has nothing earlier or is down.

        The moments of the longest window are most of a day apart, so that the part before the first of them is asked
        for again.
        """
        first_ns = known_ns
        for back_ns in (MOST_BACK_NS, 2 * MOST_BACK_NS // WINDOW_PARTS):
            try:
                before = self.samples(engine, first_ns - back_ns, first_ns) if first_ns else []
            except NotKnown:
                break
            first_ns = before[0].at_ns or first_ns if before else first_ns
        return first_ns


WINDOW_NS: Final = 600_000_000_000
"""The length of a window whose beginning is not given."""
MAX_PAST_LEDGERS: Final = 4
"""Bound of ledgers in memory: a user who inspects one time asks several queries about it."""
MAX_PREFIX_FOLDS: Final = 4
"""Bound of engines whose prefixes are kept from one query to the next: some 500 bytes for each block of the pool."""
MAX_WINDOW_BYTES: Final = 192 << 20
"""Bound of batches: some millions of events, and three times what memory keeps."""
SAMPLES_NS: Final = 3_600_000_000_000
"""For an engine without a stream, the range of samples that determine its state at one time."""
MOST_BRANCHES: Final = 14
"""Bound of branches of the prefix cache: as many as the map of blocks has colours for."""
RECEIVED_WITHIN_NS: Final = 2_000_000_000
"""An engine sends something every second."""

F = TypeVar("F", Batch, Frame)
BatchesSince = Callable[[int], Iterator[Batch]]
"""Gives the batches that were packed from a time on (wall ns)."""


def is_without_stream(ledger: EngineLedger) -> bool:
    """Return whether an engine is known from metrics or a log alone."""
    return bool(ledger.samples) and not ledger.has_stream


class ReceivedFrames(NamedTuple):
    """Frames of an engine: `frames`, to be folded into `ledger`, which no other caller uses. They begin before
    `since_ns` (wall), and are complete from then on. Iteration raises BadQuestion for too many.
    """

    ledger: EngineLedger
    frames: Iterator[Frame]
    since_ns: int


class Past:
    """The engines in `fleet`, which `lock` guards, and their past. `live` is the current ledger of an engine.

    Callers share its results with others who ask for the same time: do not apply to them.
    """

    def __init__(self, fleet: Fleet, lock: threading.RLock, history: History | None) -> None:
        self.fleet = fleet
        self.history = history
        self.stored = StoredPast()
        self._lock = lock
        self._recent: dict[str, Recent] = {}
        self._prefixes: LatestEntries[str, tuple[Prefixes, tuple[int, int]]] = LatestEntries(MAX_PREFIX_FOLDS)
        """By engine, the prefixes up to that batch, of the engines that were asked about last."""
        self._telling = threading.Lock()
        self._ledgers: LatestEntries[tuple[str, StreamTime], EngineLedger] = LatestEntries(MAX_PAST_LEDGERS)

    def look(self, live: EngineLedger, record: Record) -> None:
        """After each record that the ledger has taken in, under the lock."""
        recent = self._recent.get(live.engine)
        if recent is None:
            recent = self._recent[live.engine] = Recent()
        recent.look(live, record)

    # ---------------------------------------------------------------- which engine, and which time

    def engines(self) -> list[str]:
        """Return the engines that history knows."""
        return self.history.engines() if self.history is not None else []

    def ledger(self, engine: str) -> EngineLedger:
        """Return the ledger of an engine in its current or last state. Raises NotKnown."""
        with self._lock:
            found = self.fleet.engines.get(engine)
        found = found or self.last(engine)
        if found is None:
            known = ", ".join(sorted({*self.fleet.engines, *self.engines()})) or "none yet"
            raise NotKnown(f"there is no engine {engine!r} here; there are: {known}")
        return found

    def ledger_for(self, output: str, engine: str) -> EngineLedger:
        """Return the same, of an engine whose source has data for the output. Raises NotKnown, with the reason."""
        found = self.ledger(engine)
        require(found, output)
        return found

    def last(self, engine: str) -> EngineLedger | None:
        """Return the last state of an engine in history, or None if history cannot supply a ledger."""
        if self.history is None:
            return None
        last_ns = self.history.last_ns(engine)
        try:
            return self.history.ledger_at(engine, last_ns)
        except NotKept:  # it has no stream
            ledger = EngineLedger(engine, counting=False)
            for record in chain(self.history.facts(engine), self.history.notes(engine, last_ns - SAMPLES_NS, last_ns)):
                ledger.apply(record)
            return ledger if ledger.samples else None

    def all(self, seen_since_ns: int = 0) -> Iterator[EngineLedger]:
        """Yield the ledgers of all engines, by name. A past engine counts if it was last seen since then (wall ns)."""
        with self._lock:
            live = dict(self.fleet.engines)
        for engine in sorted({*live, *self.engines()}):
            found = live.get(engine)
            if found is None and self.history is not None and self.history.last_ns(engine) >= seen_since_ns:
                found = self.last(engine)
            if found is not None:
                yield found

    @contextmanager
    def as_of(self, engine: str, at: str, *, history: bool = False) -> Iterator[tuple[EngineLedger, BatchesSince]]:
        """Give the ledger as it was at a time, and what gives the batches until then.

        The ledger of now is the live one, under the lock. With `history`, batches are read back from disk: that is not
        done under the lock.
        """
        live = self.ledger(engine)
        if at or (history and self.history is not None):
            ledger = self.ledger_at(live, self.time(live, at))
            yield ledger, partial(self.batches, live, ledger)
            return
        with self._lock:
            yield live, partial(self.batches, live, live)

    def time(self, live: EngineLedger, text: str) -> StreamTime:
        """Return the time that `text` names, or now if it is empty or later. Raises BadTime and NotKnown."""
        named = parse_stream_time(text, live.now_ns) if text else StreamTime(live.now_ns)
        if named.position is not None:
            return named._replace(at_ns=self.ledger_at(live, named).now_ns)
        return StreamTime(min(named.at_ns, live.now_ns))

    def time_of_any(self, text: str) -> tuple[StreamTime, str]:
        """Return the same where no engine is named: a position is in the stream of one of them, which is returned."""
        with self._lock:
            now_ns = [ledger.now_ns for ledger in self.fleet.engines.values()]
        if not now_ns and self.history is not None:
            now_ns = [self.history.last_ns(engine) for engine in self.engines()]
        named = parse_stream_time(text, max(now_ns, default=0))
        if named.position is None:
            return named, ""
        for live in self.all():
            try:
                return self.time(live, text), live.engine
            except NotKnown:
                continue
        raise NotKnown(f"{named} is in no engine's stored stream")

    def times(self, live: EngineLedger, since: str, until: str) -> tuple[StreamTime, StreamTime]:
        """Return a window: until now and for WINDOW_NS where nothing is given. Raises BadQuestion and NotKnown."""
        last = self.time(live, until)
        first = self.time(live, since) if since else StreamTime(last.at_ns - WINDOW_NS)
        if first.at_ns >= last.at_ns:
            raise BadQuestion(f"the window from {since} until {until or 'now'} is empty")
        return first, last

    def first_ns(self, live: EngineLedger) -> int:
        """Return since when an engine's past is known (wall ns)."""
        first = self.span(live).first
        return parse_stream_time(first, live.now_ns).at_ns if first else live.now_ns

    # ---------------------------------------------------------------- its state, batches, points and samples

    def samples(self, live: EngineLedger, since_ns: int, until_ns: int) -> list[Sample]:
        """Return the samples of an engine without a stream from one time to another (wall), in order."""
        with self._lock:
            kept = [sample for sample in live.past_samples if since_ns <= (sample.at_ns or 0) <= until_ns]
            first_ns = (live.past_samples[0].at_ns or 0) if live.past_samples else until_ns + 1
        if since_ns >= first_ns:
            return kept
        if self.history is not None:
            notes = self.history.notes(live.engine, since_ns, min(until_ns, first_ns - 1))
            kept = [note for note in notes if isinstance(note, Sample)] + kept
            first_ns = min([first_ns, *((one.at_ns or first_ns) for one in kept[:1])])
        return self.stored.samples(live.engine, since_ns, min(until_ns + 1, first_ns)) + kept

    def samples_until(self, live: EngineLedger, at_ns: int) -> list[Sample]:
        """Return the last samples until a time (wall), at least one. Raises NotKnown where none is kept."""
        before = self.samples(live, at_ns - SAMPLES_NS, at_ns) or self.samples(live, 0, at_ns)
        if not before:
            first = self.span(live).first
            since = f": its samples begin at {first}" if first else ""
            raise NotKnown(f"of {live.engine} nothing is kept until {timestamp(at_ns)}{since}")
        return before

    def ledger_at(self, live: EngineLedger, moment: StreamTime) -> EngineLedger:
        """Return the ledger as it was then. Raises NotKnown where that is not kept."""
        key = (live.engine, moment if moment.position is None else moment._replace(at_ns=0))
        with self._lock:
            if key in self._ledgers:
                self._ledgers.move_to_end(key)
                return self._ledgers[key]
            recent = self._recent.get(live.engine)
            road = recent.road(live, moment) if recent is not None else None
        if road is None:
            return self._from_history(live, moment)
        ledger, marks = road.walk()
        with self._lock:
            self._recent[live.engine].keep_on_the_way(marks)
            if moment.at_ns < live.now_ns:  # no reader asks for the same recent time again
                self._ledgers[key] = ledger
        return ledger

    def _from_history(self, live: EngineLedger, moment: StreamTime) -> EngineLedger:
        if self.history is None:
            since_ns = self._since_ns(live.engine)
            if moment.position is not None or moment.at_ns >= since_ns:
                raise NotKnown(f"{moment} of {live.engine} is not kept")
            raise NotKnown(
                f"what was before {clock_time(since_ns)} is not kept: only a service started with --data DIR keeps more"
                if since_ns
                else f"{live.engine} has no event stream here: its past is not kept"
            )
        try:
            if moment.position is not None:
                return self.history.ledger_at_position(live.engine, moment.position)
            return self.history.ledger_at(live.engine, moment.at_ns)
        except NotKept as error:
            raise NotKnown(str(error)) from None

    def oldest_ns(self, live: EngineLedger) -> int:
        """From when on the past can be asked about for sure (wall): with history, that is known when it is asked."""
        return self._since_ns(live.engine) if self.history is None else 0

    def _since_ns(self, engine: str) -> int:
        recent = self._recent.get(engine)
        return recent.since_ns if recent is not None else 0

    def forget(self, engine: str) -> None:
        """Drop what is kept in memory of an engine that is gone. Under the lock."""
        self._recent.pop(engine, None)
        self._prefixes.pop(engine, None)
        for key in [key for key in self._ledgers if key[0] == engine]:
            del self._ledgers[key]

    def batches(self, live: EngineLedger, ledger: EngineLedger, since_ns: int) -> Iterator[Batch]:
        """Yield the batches until where `ledger` is, which is `live` or was handed out here: all that are in memory,
        and from history those packed since `since_ns` (wall).
        """
        with self._lock:
            kept = list(ledger.recent)
            place = _place(kept[0]) if kept else (ledger.epoch, ledger.sequence + 1)
            kept = [*(batch for batch in live.recent if _place(batch) < place), *kept]
        until_ns = kept[0].wall_ns if kept else ledger.now_ns
        return chain(self._older(ledger, kept, since_ns, until_ns), kept)

    def between(self, live: EngineLedger, since_ns: int, until_ns: int) -> list[Batch]:
        """Return the batches packed from one time to another (wall), as far as they are kept. Raises BadQuestion for so
        much time that they are too many to be read at once.
        """
        with self._lock:
            kept = list(live.recent)
        older = self._older(live, kept, since_ns, min(until_ns, kept[0].wall_ns) if kept else until_ns)
        first = bisect_left(kept, since_ns, key=lambda batch: batch.wall_ns)
        last = bisect_right(kept, until_ns, key=lambda batch: batch.wall_ns)
        return list(_at_once(chain(older, kept[first:last]), since_ns))

    def _older(self, ledger: EngineLedger, kept: list[Batch], since_ns: int, until_ns: int) -> Iterator[Batch]:
        """Yield history's batches from before `kept`, or before where the ledger is if nothing is kept."""
        if self.history is None or (kept and since_ns >= kept[0].wall_ns):
            return
        place = _place(kept[0]) if kept else (ledger.epoch, ledger.sequence + 1)
        for batch in self.history.batches(ledger.engine, since_ns, until_ns):
            if batch.sequence != ADDED_BY_SOURCE and _place(batch) < place:
                yield batch

    def points(self, live: EngineLedger, since_ns: int, until_ns: int, most: int) -> list[Point]:
        """Return the points from one time to another (wall): at least `most`, if there were as many."""
        with self._lock:
            kept = [point for point in live.points if since_ns <= point.at_ns <= until_ns]
            first_ns = live.points[0].at_ns if live.points else until_ns
        if self.history is None or since_ns >= first_ns:
            return kept
        return self.history.points(live.engine, since_ns, min(until_ns, first_ns - 1), most) + kept

    def window(self, live: EngineLedger, since_ns: int, moment: StreamTime) -> EngineLedger:
        """Return the ledger at a past time, with the batches and points of all the time from `since_ns` until then, as
        far as they are kept. Where they are, there is a batch from before. Raises NotKnown, and BadQuestion for so much
        time that its events are too many to be read at once.
        """
        ledger = self.ledger_at(live, moment)
        dressed = copy.copy(ledger)
        dressed.recent = deque(_at_once(self.batches(live, ledger, since_ns - RECEIVED_WITHIN_NS), since_ns))
        dressed.points = deque(self.points(live, since_ns, ledger.now_ns, MAX_POINTS))
        return dressed

    def received(self, live: EngineLedger, since_ns: int, until_ns: int) -> ReceivedFrames:
        """Return the frames from one time to another (wall), as far as they are kept. Raises NotKnown."""
        with self._lock:
            recent = self._recent.get(live.engine)
            before_ns = since_ns - 1
            if self.history is None and recent is not None:
                before_ns = max(before_ns, recent.since_ns)
                since_ns = max(since_ns, recent.since_ns)
            road = recent.road(live, StreamTime(before_ns)) if recent is not None else None
            kept = list(live.recent)
            points = list(live.points)
        if road is not None:
            mark = road.mark
            ledger = fork(mark.of)
            ledger.points.extend(points[: bisect_right(points, mark.at_ns, key=lambda point: point.at_ns)][-1:])
            later = kept[bisect_right(kept, mark.place, key=_place) :]
            frames: Iterator[Frame] = self._mended(live, mark.place, later)
        elif self.history is None:
            raise NotKnown(f"{live.engine} has no event stream here: its past is not kept")
        else:
            ledger = EngineLedger(live.engine)
            frames = self.history.tail(live.engine, since_ns)
        within = takewhile(lambda frame: frame.wall_ns <= until_ns, frames)
        ledger.counting, ledger.point_every_ns = True, POINT_EVERY_NS
        ledger.tally.follow(ledger.state)
        return ReceivedFrames(ledger, _at_once(within, since_ns), since_ns)

    def _mended(self, live: EngineLedger, place: tuple[int, int], batches: Iterable[Batch]) -> Iterator[Frame]:
        """Yield the batches that follow a position. Where some are missing, yield the state that the live ledger went
        on from.
        """
        for batch in batches:
            if batch.sequence and (batch.epoch, batch.sequence - 1) != place:
                keyframe = keyframe_of(self.ledger_at(live, StreamTime(batch.wall_ns - 1)))
                if keyframe is not None:
                    yield keyframe
            yield batch
            place = _place(batch)

    def prefixes(self, ledger: EngineLedger, *, now: bool) -> PrefixCacheView:
        """Return the prefix cache by the ledger's batches."""
        with self._prefixes_at(ledger, now) as prefixes_then:
            return prefixes(ledger, prefixes_then)

    def prefix_blocks(self, ledger: EngineLedger, *, now: bool) -> list[tuple[str, list[int]]]:
        """Return the blocks of each branch of the prefix cache, by the ledger's batches."""
        with self._prefixes_at(ledger, now) as prefixes_then:
            return by_branch(ledger, prefixes_then, MOST_BRANCHES)

    @contextmanager
    def _prefixes_at(self, ledger: EngineLedger, now: bool) -> Iterator[Prefixes]:
        """Yield the prefixes as the batches show them. For the current state, it continues the earlier fold."""
        if not now:
            prefixes_then = Prefixes()
            prefixes_then.fold(ledger.recent)
            yield prefixes_then
            return
        with self._telling:
            prefixes_then, place = self._prefixes.get(ledger.engine, (Prefixes(), (0, 0)))
            new = [batch for batch in ledger.recent if _place(batch) > place]
            if new and (new[0].epoch, new[0].sequence - 1) != place:
                prefixes_then = Prefixes()
            prefixes_then.fold(new)
            self._prefixes[ledger.engine] = prefixes_then, _place(new[-1]) if new else place
            yield prefixes_then

    def span(self, live: EngineLedger) -> HistoryView:
        """Return the history that one engine has."""
        with self._lock:
            memory_ns = self._since_ns(live.engine)
            if not memory_ns and live.past_samples:
                memory_ns = live.past_samples[0].at_ns or 0
            first_ns, last_ns = memory_ns, live.now_ns
            in_memory = _epochs_in(live)
        kept = self.history.span(live.engine) if self.history is not None else None
        epochs_then = []
        if kept is not None:
            epochs_then = [
                EpochView(kept_epoch.epoch, timestamp(kept_epoch.from_ns), timestamp(kept_epoch.to_ns))
                for kept_epoch in kept.kept_epochs
            ]
            first_ns, last_ns = min(first_ns or kept.from_ns, kept.from_ns), max(last_ns, kept.to_ns)
        elif self.history is not None:
            first_note = next(self.history.notes(live.engine, 1, live.now_ns), None)
            noted_ns = first_note.at_ns or 0 if first_note is not None else 0
            first_ns = min(first_ns or noted_ns, noted_ns or first_ns)
        first_ns = self.stored.first_ns(live.engine, first_ns)
        known = {kept_epoch.epoch for kept_epoch in epochs_then}
        epochs_then += [epoch for epoch in in_memory if epoch.epoch not in known]
        return HistoryView(
            engine=live.engine,
            first=timestamp(first_ns),
            last=timestamp(last_ns),
            in_memory_since=timestamp(memory_ns),
            epochs=epochs_then,
            gaps=[GapView(timestamp(gap.from_ns), timestamp(gap.to_ns)) for gap in kept.gaps] if kept else [],
        )


def _place(batch: Batch) -> tuple[int, int]:
    return batch.epoch, batch.sequence


def _epochs_in(live: EngineLedger) -> list[EpochView]:
    """Return the epochs whose batches are in memory, and the current one."""
    spans: dict[int, tuple[int, int]] = {}
    for batch in live.recent:
        spans[batch.epoch] = spans.get(batch.epoch, (batch.wall_ns, 0))[0], batch.wall_ns
    if live.epoch:
        spans[live.epoch] = spans.get(live.epoch, (live.last_received_ns, 0))[0], live.now_ns
    return [EpochView(epoch, timestamp(first), timestamp(last)) for epoch, (first, last) in spans.items()]


def _at_once(frames: Iterable[F], since_ns: int) -> Iterator[F]:
    """Yield the frames, unless those since then (wall) are too many to be read at once: raises BadQuestion."""
    size = 0
    for frame in frames:
        yield frame
        size += size_of(frame) if isinstance(frame, Batch) and frame.wall_ns >= since_ns else 0
        if size > MAX_WINDOW_BYTES:
            until = timestamp(frame.wall_ns)
            raise BadQuestion(f"from {timestamp(since_ns)} on there are too many events: ask until {until} or less")
