"""The recent past of one engine, from memory: the batches that its ledger keeps, and states to begin from."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from monitor.answers.moments import Moment
from monitor.events.records import RequestState
from monitor.events.state import State
from monitor.events.wire import Batch, Keyframe
from monitor.history.keyframes import sound_keyframe_of
from monitor.ledger.ledger import EngineLedger, Loss, Point, Record
from monitor.ledger.replay import first_events, observed

MIN_BETWEEN: Final = 8 << 20
"""Bytes of batches from one state kept to the next, at least: to keep one takes the reader's time, which is scarce."""
MAX_BETWEEN: Final = 16 << 20
"""And at most: a quarter of the batches that are kept."""
OUTWEIGHED: Final = 8
"""In between, so many times what the last state kept takes: large pools are not packed the more often."""
MIN_ON_THE_WAY: Final = 1 << 20
"""The same while somebody replays, who has the time: whoever asks for a moment asks for one near it next."""
MAX_ON_THE_WAY: Final = 32 << 20
"""Bytes of states that are kept from replays: the oldest of them make room."""
POINTS_BEFORE_NS: Final = 10_000_000_000
"""Of points, so much is there from the start: rates are made of them."""


class Mark(NamedTuple):
    """A state to begin from, with what of the ledger no keyframe carries. Without a keyframe it is the beginning of a
    life, whose first batch is kept.
    """

    place: tuple[int, int]
    """Epoch, and the last batch in it."""
    at_ns: int
    keyframe: Keyframe | None
    ended: tuple[RequestState, ...]
    losses: tuple[Loss, ...]
    restarts: int
    dropped_batches: int


class Road(NamedTuple):
    """A state, what was heard after it, and the moment to stop at. To be walked without a lock."""

    engine: str
    mark: Mark
    points: list[Point]
    batches: list[Batch]
    moment: Moment

    def walk(self) -> tuple[EngineLedger, list[Mark]]:
        """The ledger as it was then, and states on the way to it."""
        mark = self.mark
        ledger = EngineLedger(self.engine)
        if mark.keyframe is not None:
            ledger.apply(mark.keyframe)
            ledger.ended.extend(mark.ended)
            ledger.losses.extend(mark.losses)
            ledger.dropped_batches = mark.dropped_batches
        ledger.restarts = mark.restarts
        ledger.points.extend(self.points)
        marks: list[Mark] = []
        walked = 0
        whole = len(self.batches) - (self.moment.position is not None)
        for number, batch in enumerate(self.batches, 1):
            ledger.apply(batch)
            walked += size_of(batch)
            if walked >= MIN_ON_THE_WAY and number <= whole and (passed := mark_of(ledger)) is not None:
                marks.append(passed)
                walked = 0
        if self.moment.position is None:
            ledger.apply(observed(self.engine, ledger.epoch, self.moment.at_ns))
        return ledger, marks


def mark_of(ledger: EngineLedger) -> Mark | None:
    """The ledger's state as it is; None while its books are being put right."""
    keyframe = sound_keyframe_of(ledger)
    return _mark(ledger, keyframe) if keyframe is not None else None


def _mark(ledger: EngineLedger, keyframe: Keyframe) -> Mark:
    return Mark(
        (ledger.epoch, ledger.sequence), keyframe.wall_ns, keyframe, tuple(ledger.ended), tuple(ledger.losses),
        ledger.restarts, ledger.dropped_batches,
    )  # fmt: skip


def size_of(batch: Batch) -> int:
    """Bytes of its columns."""
    return len(batch.runs) + len(batch.args) + len(batch.ids)


class Recent:
    """What is kept of one engine to begin from. `look` after each record that its ledger has taken in."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()
        self._on_the_way: deque[Mark] = deque()
        self._bytes_on_the_way = 0
        self._state: State | None = None
        self._bytes = 0
        """Of batches since the last mark."""
        self._enough = MIN_BETWEEN

    @property
    def since_ns(self) -> int:
        """From when on a moment can be asked for (wall); 0 if none can."""
        return self._marks[0].at_ns if self._marks else 0

    def look(self, ledger: EngineLedger, record: Record) -> None:
        """Keep the ledger's state if it is a new one, or if much was heard since the last."""
        if isinstance(record, Batch):
            self._bytes += size_of(record)
        if ledger.state is not self._state and ledger.ready:
            mark: Mark | None
            if isinstance(record, Keyframe):  # as it came: what an audit has seen of it so far is in no other
                mark = _mark(ledger, record)
            elif ledger.sequence == 0:
                mark = Mark((ledger.epoch, -1), ledger.heard_ns, None, (), (), ledger.restarts, 0)
            else:
                mark = mark_of(ledger)
            self._keep(ledger, mark)
        elif self._bytes >= self._enough:
            self._keep(ledger, mark_of(ledger))
        while self._marks and self._is_cut_off(self._marks[0], ledger):
            self._marks.popleft()

    def _keep(self, ledger: EngineLedger, mark: Mark | None) -> None:
        if mark is not None:
            self._state, self._bytes = ledger.state, 0
            self._enough = max(MIN_BETWEEN, min(MAX_BETWEEN, OUTWEIGHED * _weight(mark)))
            self._marks.append(mark)

    def keep_on_the_way(self, marks: list[Mark]) -> None:
        """States that a replay came by."""
        self._on_the_way.extend(marks)
        self._bytes_on_the_way += sum(map(_weight, marks))
        while self._bytes_on_the_way > MAX_ON_THE_WAY:
            self._bytes_on_the_way -= _weight(self._on_the_way.popleft())

    @staticmethod
    def _is_cut_off(mark: Mark, ledger: EngineLedger) -> bool:
        """Whether the batches that came after it are not all there any more."""
        if not ledger.recent:
            return False
        oldest = ledger.recent[0]
        return mark.place < (oldest.epoch, oldest.sequence - 1)

    def road(self, ledger: EngineLedger, moment: Moment) -> Road | None:
        """The way to a moment; None if what it needs is not kept, or not any more."""
        if moment.position is None and moment.at_ns >= ledger.now_ns and (mark := mark_of(ledger)) is not None:
            return Road(ledger.engine, mark, _points_before(ledger, mark), [], moment)
        batches = _until(ledger, moment)
        place = moment.position[:2] if moment.position is not None else None
        if place is not None and (not batches or (batches[-1].epoch, batches[-1].sequence) != place):
            return None
        before = [
            mark
            for mark in (*self._marks, *self._on_the_way)
            if (mark.at_ns <= moment.at_ns if place is None else mark.place < place)
            and not self._is_cut_off(mark, ledger)
        ]
        if not before:
            return None
        mark = max(before, key=lambda mark: mark.place)
        first = bisect_right(batches, mark.place, key=lambda batch: (batch.epoch, batch.sequence))
        return Road(ledger.engine, mark, _points_before(ledger, mark), batches[first:], moment)


def _weight(mark: Mark) -> int:
    """About how many bytes it takes."""
    return len(mark.keyframe.state) + 8 * len(mark.ended) if mark.keyframe is not None else 0


def _points_before(ledger: EngineLedger, mark: Mark) -> list[Point]:
    return [point for point in ledger.points if mark.at_ns - POINTS_BEFORE_NS <= point.at_ns <= mark.at_ns]


def _until(ledger: EngineLedger, moment: Moment) -> list[Batch]:
    """What the ledger keeps of the batches until the moment, the last of them cut short where a position is in it."""
    recent = list(ledger.recent)
    if moment.position is None:
        return recent[: bisect_right(recent, moment.at_ns, key=lambda batch: batch.wall_ns)]
    place = moment.position[:2]
    batches = recent[: bisect_right(recent, place, key=lambda batch: (batch.epoch, batch.sequence))]
    if batches and (batches[-1].epoch, batches[-1].sequence) == place and not moment.whole_batch:
        batches[-1] = first_events(batches[-1], moment.position.event + 1)
    return batches
