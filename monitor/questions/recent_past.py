"""The recent past of one engine, from memory: the batches that its ledger keeps, and states to begin from."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from typing import Final, NamedTuple

from ..base.errors import BadTime
from ..base.text import moment, timestamp
from ..contract.samples import Record
from ..contract.wire import Batch
from ..ledger.engine_ledger import POINT_EVERY_NS, EngineLedger, Point, Position
from ..ledger.engine_state import EngineState
from ..ledger.partial_replay import first_events, fork, observed

MIN_BETWEEN: Final = 4 << 20
"""Bytes of batches from one state kept to the next, at least: to keep one takes the reader's time, which is scarce."""
MAX_BETWEEN: Final = 16 << 20
"""And at most: a quarter of the batches that are kept. In between, as many as the last state kept takes."""
MIN_ON_THE_WAY: Final = 1 << 20
"""The same during a replay, which has the time: a query for one time usually precedes one for a time near it."""
MAX_ON_THE_WAY: Final = 64 << 20
"""Bytes of states that are kept from replays: those make room that stand closest between others."""
MOST_ON_THE_WAY: Final = 64
LEDGER_WEIGHT: Final = 100_000
"""Bytes of a ledger of an engine without blocks and requests."""
REQUEST_WEIGHT: Final = 1_250
RECORD_WEIGHT: Final = 160
POINTS_BEFORE_NS: Final = 10_000_000_000
"""The span of points that is there from the start: rates are derived from them."""
NO_POINTS: Final = 1 << 62
"""While it replays a ledger need make none: those that the live one made are there."""

_POSITION: Final = re.compile(r"(\d{1,20})/(\d{1,15})(?:/(\d{1,9}))?")


class StreamTime(NamedTuple):
    """A time (wall ns), or just after an event, or with `whole_batch` after the last one of its batch."""

    at_ns: int
    position: Position | None = None
    whole_batch: bool = False

    def __str__(self) -> str:
        """Return it formatted for display."""
        return timestamp(self.at_ns) or "" if self.position is None else f"position {self.position}"


def parse_stream_time(text: str, near_ns: int) -> StreamTime:
    """Return the time that `text` names. A time of day is the last such until `near_ns` (wall). Raises BadTime."""
    match = _POSITION.fullmatch(text)
    if match:
        return StreamTime(0, Position(int(match[1]), int(match[2]), int(match[3] or 0)), match[3] is None)
    try:
        return StreamTime(moment(text, near_ns))
    except ValueError as error:
        raise BadTime(str(error)) from None


class PastMark(NamedTuple):
    """A state to begin from: a ledger that is not applied to any more. `of` it is forked."""

    place: tuple[int, int]
    """Epoch, and the last batch in it (-1 before the first)."""
    at_ns: int
    of: EngineLedger


class Road(NamedTuple):
    """A state, the batches after it, and the time to stop at. To be walked without a lock."""

    mark: PastMark
    points: list[Point]
    """Points that the live ledger made until the last of the batches."""
    batches: list[Batch]
    moment: StreamTime

    def walk(self) -> tuple[EngineLedger, list[PastMark]]:
        """Return the ledger as it was then, and states on the way to it, itself the last where it is one to go on
        from.
        """
        ledger = fork(self.mark.of)
        ledger.points = deque(self.points, ledger.points.maxlen)
        ledger.point_every_ns = NO_POINTS
        marks: list[PastMark] = []
        walked = 0
        for batch in self.batches[:-1]:
            ledger.apply(batch)
            walked += size_of(batch)
            if walked >= max(MIN_ON_THE_WAY, _weight(ledger) // 32):
                marks.append(mark_of(fork(ledger)))
                walked = 0
        if self.moment.position is not None:
            ledger.point_every_ns = POINT_EVERY_NS
        for batch in self.batches[-1:]:
            ledger.apply(batch)
        ledger.point_every_ns = POINT_EVERY_NS
        if self.moment.position is None:
            ledger.apply(observed(ledger.engine, ledger.epoch, self.moment.at_ns))
            marks.append(mark_of(ledger))
        return ledger, marks


def mark_of(ledger: EngineLedger) -> PastMark:
    """Return a mark of the ledger, which must not be applied to any more."""
    return PastMark((ledger.epoch, ledger.sequence), ledger.last_received_ns, ledger)


def size_of(batch: Batch) -> int:
    """Bytes of its columns."""
    return len(batch.runs) + len(batch.args) + len(batch.ids)


class Recent:
    """Starting points for replays of one engine. `look` after each record that its ledger has taken in."""

    def __init__(self) -> None:
        self._marks: deque[PastMark] = deque()
        self._on_the_way: list[PastMark] = []
        """In order."""
        self._state: EngineState | None = None
        self._bytes = 0
        """Bytes of batches since the last mark."""
        self._enough = MIN_BETWEEN

    @property
    def since_ns(self) -> int:
        """The earliest time of a query (wall), or 0 if none is possible."""
        return self._marks[0].at_ns if self._marks else 0

    def look(self, ledger: EngineLedger, record: Record) -> None:
        """Keep the ledger's state if it is a new one, or after many events since the last."""
        if isinstance(record, Batch):
            self._bytes += size_of(record)
        if ledger.state is not self._state and ledger.ready:
            if ledger.sequence == 0 and isinstance(
                record, Batch
            ):  # the beginning of an epoch, whose first batch is kept
                unborn = EngineLedger(ledger.engine, counting=False)
                unborn.restarts = ledger.restarts
                self._keep(ledger, PastMark((ledger.epoch, -1), ledger.last_received_ns, unborn))
            else:
                self._keep(ledger, mark_of(fork(ledger)))
        elif self._bytes >= self._enough:
            self._keep(ledger, mark_of(fork(ledger)))
        while self._marks and self._is_cut_off(self._marks[0], ledger):
            self._marks.popleft()
        while self._on_the_way and self._is_cut_off(self._on_the_way[0], ledger):
            del self._on_the_way[0]

    def _keep(self, ledger: EngineLedger, mark: PastMark) -> None:
        self._state, self._bytes = ledger.state, 0
        self._enough = max(MIN_BETWEEN, min(MAX_BETWEEN, _weight(mark.of)))
        self._marks.append(mark)

    def keep_on_the_way(self, marks: list[PastMark]) -> None:
        """States that a replay came by."""
        kept = sorted((*self._on_the_way, *marks), key=_batch_place)
        most = min(MOST_ON_THE_WAY, MAX_ON_THE_WAY // max((_weight(mark.of) for mark in kept), default=LEDGER_WEIGHT))
        while len(kept) > most:
            times = sorted(mark.at_ns for mark in (*self._marks, *kept))
            rooms = [_room(times, mark.at_ns) for mark in kept]
            del kept[rooms.index(min(rooms))]
        self._on_the_way = kept

    @staticmethod
    def _is_cut_off(mark: PastMark, ledger: EngineLedger) -> bool:
        """Whether the batches that came after it are not all there any more."""
        if not ledger.recent:
            return False
        oldest = ledger.recent[0]
        return mark.place < (oldest.epoch, oldest.sequence - 1)

    def road(self, ledger: EngineLedger, moment: StreamTime) -> Road | None:
        """Return the way to a time, or None if its data is not kept, or not any more."""
        if moment.position is None and moment.at_ns >= ledger.now_ns and ledger.ready:
            return Road(mark_of(fork(ledger)), _points_until(ledger, ledger.now_ns), [], moment)
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
        mark = max(before, key=_batch_place)
        first = bisect_right(batches, mark.place, key=lambda batch: (batch.epoch, batch.sequence))
        batches = batches[first:]
        # The live ledger's point covers more than a batch that is cut short.
        until_ns = batches[-1].wall_ns - (place is not None) if batches else mark.at_ns
        return Road(mark, _points_until(ledger, until_ns), batches, moment)


def _batch_place(mark: PastMark) -> tuple[int, int]:
    return mark.place


def _room(times: list[int], at_ns: int) -> int:
    """How much time there is around one of these times, from the one before to the one after it."""
    index = bisect_left(times, at_ns)
    return times[min(index + 1, len(times) - 1)] - times[max(index - 1, 0)]


def _weight(ledger: EngineLedger) -> int:
    """About how many bytes it takes, as a fork that shares nothing with the live one any more."""
    requests = len(ledger.state.requests) + len(ledger.ended)
    others = len(ledger.prompts) + len(ledger.preempted)
    return LEDGER_WEIGHT + 48 * ledger.state.total + REQUEST_WEIGHT * requests + RECORD_WEIGHT * others


def _points_until(ledger: EngineLedger, until_ns: int) -> list[Point]:
    return [point for point in ledger.points if until_ns - POINTS_BEFORE_NS <= point.at_ns <= until_ns]


def _until(ledger: EngineLedger, moment: StreamTime) -> list[Batch]:
    """Return the ledger's batches until the time, the last of them cut short where a position is in it."""
    recent = list(ledger.recent)
    if moment.position is None:
        return recent[: bisect_right(recent, moment.at_ns, key=lambda batch: batch.wall_ns)]
    place = moment.position[:2]
    batches = recent[: bisect_right(recent, place, key=lambda batch: (batch.epoch, batch.sequence))]
    if batches and (batches[-1].epoch, batches[-1].sequence) == place and not moment.whole_batch:
        batches[-1] = first_events(batches[-1], moment.position.event + 1)
    return batches
