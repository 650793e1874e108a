"""From an engine's log to frames: numbers the batches, packs their columns, and keeps the shadow.

Runs in the drain thread, or wherever a test calls it. The shadow is folded from the very lists that are packed, so
a keyframe cut from it is the state after the last batch packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ..contract.event_log import EventLog, Flushed
from ..contract.kinds import Kind
from ..contract.wire import Batch, Keyframe, column, fives
from ..ledger import keyframe_codec
from ..ledger.engine_state import EngineState
from ..ledger.fold import apply_events

_WITH_HASHES: Final = (int(Kind.CACHED), int(Kind.ALLOCATED))
MAX_RUN_VALUES = 5 * 65536
"""Flushes are merged into one batch up to about this many numbers."""


class Vitals(NamedTuple):
    """The state of an engine that other threads can read at any time, for heartbeats."""

    step_in_flight: int
    in_flight_since_ns: int
    running: int
    waiting: int
    front_end_in_flight: int
    connector_polls: int
    scheduler_passes: int


class Packer:
    """Makes frames of what `log` holds. `vitals` is asked at each heartbeat.

    folds_late: batches are kept until a keyframe is cut, and folded into the shadow then. An engine in virtual time
    cuts few keyframes, and a live one would have to wait for the fold.
    """

    def __init__(
        self,
        log: EventLog,
        engine: str,
        vitals: Callable[[], Vitals],
        epoch: int | None = None,
        *,
        folds_late: bool = False,
    ) -> None:
        self.log = log
        self.engine = engine
        self.epoch = log.clock.time_ns() if epoch is None else epoch
        self.shadow = EngineState()
        self.next_sequence = 0
        self._vitals = vitals
        self.vitals = Vitals(-1, 0, 0, 0, 0, 0, 0)
        """The state at the last heartbeat."""
        self._last_step = -1
        self._counts = (-1, -1, -1, -1)
        self._dropped = (0, 0)
        self._shadow_dropped = 0
        self._folds_late = folds_late
        self._unfolded: list[Batch] = []

    def pack(self) -> list[Batch]:
        """Everything flushed until now, as batches in order. Events that other threads logged come before it."""
        count = len(self.log.flushed)  # first: events from other threads before a flush must not come after it
        batches = []
        side = self._take_side()
        if side is not None:
            batches.append(side)
        flushes = [Flushed._make(self.log.flushed.popleft()) for _ in range(count)]
        while flushes:
            merged, size = 1, len(flushes[0].runs)
            while (
                merged < len(flushes)
                and size < MAX_RUN_VALUES
                and flushes[merged].dropped_batches == flushes[0].dropped_batches
            ):
                size += len(flushes[merged].runs)
                merged += 1
            batches.append(self._pack(flushes[:merged]))
            del flushes[:merged]
        return batches

    def heartbeat(self) -> Batch:
        """Return a batch that reports only that the drain thread is alive, and its view of the engine."""
        self.vitals = self._vitals()
        args = [self.log.clock.monotonic_ns(), self.next_sequence - 1, self._last_step, *self.vitals]
        return self._batch({}, [Kind.HEARTBEAT, 0, -1, len(args), 0], args, [], self._last_step, self._last_step)

    def keyframe(self) -> Keyframe:
        """Return the shadow at the end of the last batch packed."""
        for batch in self._unfolded:
            self._fold(batch, *batch.columns())
        self._unfolded.clear()
        return Keyframe(
            self.engine,
            self.epoch,
            self.next_sequence - 1,
            self._last_step,
            self.log.clock.time_ns(),
            self.log.clock.monotonic_ns(),
            self.shadow.damaged,
            keyframe_codec.dump_state(self.shadow),
        )

    def _take_side(self) -> Batch | None:
        texts: dict[int, str] = {}
        runs: list[int] = []
        args: list[int] = []
        for _ in range(len(self.log.side)):
            run, run_args, run_texts = self.log.side.popleft()
            runs += run
            args += run_args
            texts |= run_texts
        return self._batch(texts, runs, args, [], self._last_step, self._last_step) if runs else None

    def _pack(self, flushes: list[Flushed]) -> Batch:
        first, last = flushes[0], flushes[-1]
        self._last_step = max(self._last_step, last.last_step)
        self._counts = last.counts
        self._dropped = (last.dropped_batches, last.dropped_events)
        if self.log.keyed is not None:
            for flush in flushes:
                _key_hashes(flush, self.log.keyed)
        if len(flushes) == 1:
            return self._batch(first.texts, first.runs, first.args, first.ids, first.first_step, last.last_step, last)
        texts: dict[int, str] = {}
        runs: list[int] = []
        args: list[int] = []
        ids: list[int] = []
        for flush in flushes:
            texts.update(flush.texts)
            runs += flush.runs
            args += flush.args
            ids += flush.ids
        return self._batch(texts, runs, args, ids, first.first_step, last.last_step, last)

    def _batch(
        self,
        texts: dict[int, str],
        runs: list[int],
        args: list[int],
        ids: list[int],
        first_step: int,
        last_step: int,
        flush: Flushed | None = None,
    ) -> Batch:
        clock = self.log.clock
        batch = Batch(
            self.engine,
            self.epoch,
            self.next_sequence,
            first_step,
            last_step,
            flush.wall_ns if flush else clock.time_ns(),
            flush.mono_ns if flush else clock.monotonic_ns(),
            *self._counts,
            *self._dropped,
            texts,
            column("i", runs),
            column("q", args),
            column("i", ids),
        )
        self.next_sequence += 1
        if self._folds_late:
            self._unfolded.append(batch)
        else:
            self._fold(batch, runs, args, ids)
        return batch

    def _fold(self, batch: Batch, runs: list[int], args: list[int], ids: list[int]) -> None:
        if batch.dropped_batches > self._shadow_dropped:
            self._shadow_dropped = batch.dropped_batches
            self.shadow.mark_damaged()
        apply_events(self.shadow, runs, args, ids, batch.texts, batch.sequence)
        self.shadow.take_news()


def _key_hashes(flush: Flushed, keyed: Callable[[bytes], int]) -> None:
    """Put keyed hashes in the place of those that are not: nothing else could be packed, as bytes are no number."""
    args, at = flush.args, 0
    for kind, _, _, count, _ in fives(flush.runs):
        if count and kind in _WITH_HASHES:
            args[at : at + count] = [keyed(value) for value in args[at : at + count]]
        at += count
