"""The events of each live request, kept as the stream comes, until it ends and its trace is made of them.

A scan of the batches for each request that ends would read seconds of a busy engine's stream again and again. So each
event about a request is put with it when it comes: arrival, waits, preemptions, every step of its prefill, and of the
steps that only made its output longer the last one before something else happened.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from itertools import repeat
from typing import Final, NamedTuple

from ...contract.kinds import Kind
from ...contract.samples import Record
from ...contract.wire import ADDED_BY_SOURCE, Batch, Run, fives
from ...ledger.engine_ledger import Position
from ...ledger.event_history import CARRIES_TIME, LEAST_ARGS, OWN_TIME

About = tuple[Position, int, Run]
"""An event about a request, with its place and its wall time, as kvscope.monitor.ledger.event_history has them."""

MAX_EVENTS: Final = 2_000
"""Kept of one request: one with endless preemptions keeps its beginning."""
MAX_ENDED_RECORDS: Final = 4_096
MAX_LIVING: Final = 16_384

_KEPT: Final = frozenset(
    int(kind)
    for kind in (
        Kind.RECEIVED,
        Kind.ARRIVED,
        Kind.QUEUED,
        Kind.LOOKED_UP,
        Kind.ALLOCATION_FAILED,
        Kind.NOT_SCHEDULED,
        Kind.ADMITTED,
        Kind.FIRST_TOKEN,
        Kind.PREEMPTED,
        Kind.WAITING_ON,
        Kind.READY,
        Kind.REMOTE_LOAD,
        Kind.COMPLETION_DELIVERED,
        Kind.STALLED,
        Kind.FINISHED,
        Kind.CLIENT_GONE,
        Kind.TRACED,
    )
)
_PROGRESSED_KIND, _ADMITTED, _FINISHED_KIND = int(Kind.PROGRESSED), int(Kind.ADMITTED), int(Kind.FINISHED)
_PREEMPTED, _BEGINS = int(Kind.PREEMPTED), (int(Kind.RECEIVED), int(Kind.ARRIVED))


class RecordedRequest(NamedTuple):
    """All events of a request, and the ids of the other requests that are in it."""

    about: list[About]
    names: dict[int, str]
    cut: int
    """Events that were dropped, as there were too many, and the number of losses on the way."""

    @property
    def is_whole(self) -> bool:
        """Whether its events are complete from the beginning."""
        return bool(self.about) and self.about[0][2].kind in _BEGINS and not self.cut


NOT_RECORDED: Final = RecordedRequest([], {}, 0)


class RequestRecorder:
    """The recorded requests of all engines. Thread-safe."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._lock = threading.Lock()

    def follow(self, records: Iterable[Record]) -> None:
        """Keep the events of requests. No record from an engine makes this raise."""
        with self._lock:
            for record in records:
                if isinstance(record, Batch) and record.sequence != ADDED_BY_SOURCE:
                    engine = self._engines.get(record.engine)
                    if engine is None or engine.epoch < record.epoch:
                        engine = self._engines[record.engine] = _Engine(record.epoch)
                    engine.follow(record)

    def take(self, engine: str, number: int) -> RecordedRequest:
        """Remove and return the record of a request that has ended."""
        with self._lock:
            known = self._engines.get(engine)
            return known.ended.pop(number, NOT_RECORDED) if known is not None else NOT_RECORDED


class _Engine:
    """The requests of one life of an engine."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.ended: dict[int, RecordedRequest] = {}
        self._sequence = self._dropped = -1
        self._mono_ns = 0
        self._about: dict[int, list[About]] = {}
        self._cut: dict[int, int] = {}
        self._others: dict[int, dict[int, str]] = {}
        self._names: dict[int, str] = {}
        self._outputs_before: dict[int, int] = {}
        """Requests in prefill: how many tokens of output each had when it was admitted."""
        self._moved: dict[int, tuple[Position, int, int, int]] = {}
        """The last step of each: where, when, computed tokens, output tokens. Not yet among what is kept."""

    def follow(self, batch: Batch) -> None:
        if batch.epoch < self.epoch or batch.sequence <= self._sequence:
            return
        if 0 <= self._sequence < batch.sequence - 1 or 0 <= self._dropped < batch.dropped_batches:
            for number in self._about:
                self._cut[number] = self._cut.get(number, 0) + 1
        self._sequence, self._dropped = batch.sequence, batch.dropped_batches
        self._names.update(batch.texts)
        with contextlib.suppress(
            IndexError, TypeError, ValueError
        ):  # an event that breaks the contract: the ledger reports it
            self._follow(batch)
        while len(self._about) > MAX_LIVING:  # requests whose ends were lost
            self._forget(next(iter(self._about)))
        for known in (self._names, self._moved):
            if len(known) > 2 * MAX_LIVING:  # audits name requests that have ended
                known.clear()

    def _follow(self, batch: Batch) -> None:
        runs, args, ids = batch.columns()
        offset = batch.wall_ns - batch.mono_ns
        prefilling, moved = self._outputs_before.keys(), self._moved
        a = i = 0
        for index, (kind, group, number, n_args, n_ids) in enumerate(fives(runs)):
            if kind == _PROGRESSED_KIND:
                numbers, half = ids[i : i + n_ids], a + n_ids
                place, at = Position(batch.epoch, batch.sequence, index), self._mono_ns + offset
                steps = zip(repeat(place), repeat(at), args[a:half], args[half : a + n_args], strict=False)
                moved.update(zip(numbers, steps, strict=False))
                for each in prefilling & set(numbers) if prefilling else ():
                    self._prefilled(each)
            elif kind in _KEPT or kind in CARRIES_TIME:
                if n_args < LEAST_ARGS[kind]:
                    raise IndexError
                if kind in CARRIES_TIME:
                    self._mono_ns = args[a]
                if kind in _KEPT:
                    at = (args[a] if kind in OWN_TIME else self._mono_ns) + offset
                    place = Position(batch.epoch, batch.sequence, index)
                    self._keep(place, at, Run(kind, group, number, args[a : a + n_args], []))
            a += n_args
            i += n_ids

    def _prefilled(self, number: int) -> None:
        """Note a step of a prefill. With a new token of output it was the last."""
        if self._moved[number][3] > self._outputs_before[number]:
            del self._outputs_before[number]
        self._keep_last_step(number)

    def _keep(self, place: Position, at_ns: int, event: Run) -> None:
        number = event.request
        if number in self.ended:
            return  # its client disconnected after its end, for example
        about = self._about.setdefault(number, [])
        self._keep_last_step(number)
        self._append(number, (place, at_ns, event))
        if event.kind == _ADMITTED:
            steps = (before.args[1] for _, _, before in reversed(about) if before.kind == _PROGRESSED_KIND)
            self._outputs_before[number] = next(steps, 0)
        elif event.kind == _PREEMPTED:
            self._outputs_before.pop(number, None)
            # The request that got the blocks may end before this one, and its name be dropped.
            if event.args[1] in self._names:
                self._others.setdefault(number, {})[event.args[1]] = self._names[event.args[1]]
        elif event.kind == _FINISHED_KIND:
            self._end(number)

    def _keep_last_step(self, number: int) -> None:
        step = self._moved.pop(number, None)
        if step is not None and number in self._about:
            self._append(number, (step[0], step[1], Run(_PROGRESSED_KIND, 0, -1, [step[2], step[3]], [number])))

    def _append(self, number: int, one: About) -> None:
        about = self._about[number]
        if len(about) < MAX_EVENTS or one[2].kind == _FINISHED_KIND:
            about.append(one)
        else:
            self._cut[number] = self._cut.get(number, 0) + 1

    def _end(self, number: int) -> None:
        self.ended[number] = RecordedRequest(
            self._about[number], self._others.get(number, {}), self._cut.get(number, 0)
        )
        if len(self.ended) > MAX_ENDED_RECORDS:
            del self.ended[next(iter(self.ended))]
        self._forget(number)

    def _forget(self, number: int) -> None:
        self._about.pop(number, None)
        self._cut.pop(number, None)
        self._others.pop(number, None)
        self._names.pop(number, None)
        self._outputs_before.pop(number, None)
        self._moved.pop(number, None)
