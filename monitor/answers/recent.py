"""The recent past of one engine, from memory: the batches that its ledger keeps, and states to begin from."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from monitor.answers.moments import Moment
from monitor.events.records import RequestState
from monitor.events.state import State
from monitor.events.wire import Batch, Keyframe
from monitor.history.keyframes import keyframe_of
from monitor.ledger.ledger import EngineLedger, Loss, Point, Record
from monitor.ledger.replay import first_events, observed

MIN_BETWEEN: Final = 1 << 20
"""Bytes of batches from one state kept to the next, at least: what replays in a twentieth of a second."""
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

    def walk(self) -> EngineLedger:
        """The ledger as it was then."""
        mark = self.mark
        ledger = EngineLedger(self.engine)
        if mark.keyframe is not None:
            ledger.apply(mark.keyframe)
            ledger.ended.extend(mark.ended)
            ledger.losses.extend(mark.losses)
            ledger.dropped_batches = mark.dropped_batches
        ledger.restarts = mark.restarts
        ledger.points.extend(self.points)
        for batch in self.batches:
            ledger.apply(batch)
        if self.moment.position is None:
            ledger.apply(observed(self.engine, ledger.epoch, self.moment.at_ns))
        return ledger


class Recent:
    """What is kept of one engine to begin from. `look` after each record that its ledger has taken in."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()
        self._state: State | None = None
        self._bytes = 0
        """Of batches since the last mark."""
        self._enough = 0

    @property
    def since_ns(self) -> int:
        """From when on a moment can be asked for (wall); 0 if none can."""
        return self._marks[0].at_ns if self._marks else 0

    def look(self, ledger: EngineLedger, record: Record) -> None:
        """Keep the ledger's state if it is a new one, or if what was heard since the last has grown as large."""
        if isinstance(record, Batch):
            self._bytes += len(record.runs) + len(record.args) + len(record.ids)
        if ledger.state is self._state:
            if self._bytes >= self._enough and isinstance(record, Batch):
                self._mark(ledger, keyframe_of(ledger))
        elif ledger.ready:
            if isinstance(record, Batch) and record.sequence == 0:
                self._mark(ledger, None)
            else:  # as it came: what an audit has seen of it so far is in no other
                self._mark(ledger, record if isinstance(record, Keyframe) else keyframe_of(ledger))
        while self._marks and self._is_cut_off(self._marks[0], ledger):
            self._marks.popleft()

    def _mark(self, ledger: EngineLedger, keyframe: Keyframe | None) -> None:
        if keyframe is None and ledger.sequence:
            return  # not now: the books are being put right
        self._state, self._bytes = ledger.state, 0
        self._enough = max(MIN_BETWEEN, len(keyframe.state) if keyframe is not None else 0)
        place = (ledger.epoch, ledger.sequence if keyframe is not None else -1)
        at_ns = keyframe.wall_ns if keyframe is not None else ledger.heard_ns
        ended, losses = (tuple(ledger.ended), tuple(ledger.losses)) if keyframe is not None else ((), ())
        self._marks.append(Mark(place, at_ns, keyframe, ended, losses, ledger.restarts, ledger.dropped_batches))

    @staticmethod
    def _is_cut_off(mark: Mark, ledger: EngineLedger) -> bool:
        """Whether the batches that came after it are not all there any more."""
        if not ledger.recent:
            return False
        oldest = ledger.recent[0]
        return mark.place < (oldest.epoch, oldest.sequence - 1)

    def road(self, ledger: EngineLedger, moment: Moment) -> Road | None:
        """The way to a moment; None if what it needs is not kept, or not any more."""
        batches = _until(ledger, moment)
        place = moment.position[:2] if moment.position is not None else None
        if place is not None and (not batches or (batches[-1].epoch, batches[-1].sequence) != place):
            return None
        for mark in reversed(self._marks):
            too_late = mark.at_ns > moment.at_ns if place is None else mark.place >= place
            if not too_late:
                first = bisect_right(batches, mark.place, key=lambda batch: (batch.epoch, batch.sequence))
                points = [p for p in ledger.points if mark.at_ns - POINTS_BEFORE_NS <= p.at_ns <= mark.at_ns]
                return Road(ledger.engine, mark, points, batches[first:], moment)
        return None


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
