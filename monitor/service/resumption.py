"""Takes engines up where the service before this one left them, and notices those that never come back."""

from __future__ import annotations

import time
from itertools import chain
from typing import Final, NamedTuple

from ..contract.kinds import Kind
from ..contract.wire import Run, batch_of
from ..detectors.findings import Transition
from ..history.history import History
from ..ledger.engine_ledger import MAX_POINTS, Point, Position
from ..questions.pipeline import Pipeline

RESUME_NS: Final = 600_000_000_000
"""An engine that the service received this shortly before its restart resumes where it was left."""
COME_BACK_NS: Final = 10_000_000_000
"""The time for an engine to be received again. After it the engine is silent."""
SILENCE_EVERY_NS: Final = 1_000_000_000
TAIL_NS: Final = 30_000_000_000
"""The last records before the restart that are applied again, so that the recent past is complete."""
POINTS_NS: Final = 3_600_000_000_000
"""So much comes with it of its points, and of a page's samples."""
NO_END_NS: Final = (1 << 63) - 1
"""Points are in the time of the service that made them, whose clock may have been ahead of the stream's last batch."""


class ResumedEngine(NamedTuple):
    """An engine as it was taken up: where in its stream, and by how much this clock is ahead of stream time.

    A clock that was set since the engine was first received is ahead or behind by that much, and no time has passed.
    """

    position: Position
    ahead_ns: int


class Resumption:
    """The engines of `past`, taken up in `watch`."""

    def __init__(self, watch: Pipeline) -> None:
        self._watch = watch
        self._began_ns = self._observed_ns = time.time_ns()
        self._resumed: dict[str, ResumedEngine] = {}
        """Resumed engines that have not been received yet."""
        self._kept_until_ns: dict[str, int] = {}
        self.unwritten: dict[str, list[Point]] = {}
        """The points of resumed engines that a killed service had not written yet."""

    def resume(self, past: History) -> list[Transition]:
        """Resume every engine of `past` that was received until just now. Return what fired or ended by that."""
        transitions = []
        for engine in past.engines():
            until_ns, wall_ns = past.last_ns(engine), past.last_wall_ns(engine)
            self._kept_until_ns[engine] = wall_ns
            if time.time_ns() - wall_ns > RESUME_NS:
                continue
            facts = past.facts(engine) if past.span(engine) is None else ()
            notes = past.notes(engine, until_ns - POINTS_NS, until_ns)
            records = chain(facts, notes, past.tail(engine, until_ns - TAIL_NS))
            points = past.points(engine, until_ns - POINTS_NS, NO_END_NS, MAX_POINTS)
            transitions += self._watch.resume(records, points)
            if engine in self._watch.fleet.engines and self._watch.fleet.engines[engine].has_stream:
                ledger = self._watch.fleet.engines[engine]
                last_ns = past.last_point_ns(engine, until_ns - POINTS_NS)
                if missing := [point for point in ledger.points if point.at_ns > last_ns]:
                    self.unwritten[engine] = missing
                self._resumed[engine] = ResumedEngine(ledger.position(), wall_ns - ledger.now_ns)
        return transitions

    def watch_for_silence(self) -> None:
        """Let time pass for a resumed engine that is gone: no stream knows that it should be there."""
        now_ns = time.time_ns()
        if not self._resumed or now_ns - self._observed_ns < SILENCE_EVERY_NS:
            return
        self._observed_ns = now_ns
        for engine, resumed in list(self._resumed.items()):
            ledger = self._watch.fleet.engines.get(engine)
            if ledger is None or ledger.position() != resumed.position:
                self._resumed.pop(engine, None)
            elif now_ns - self._began_ns > COME_BACK_NS:
                stream_ns = now_ns - resumed.ahead_ns
                silence = Run(Kind.OBSERVED, 0, -1, [stream_ns], [])
                self._watch.feed([batch_of(engine, ledger.epoch, [silence], wall_ns=stream_ns)])

    def drop(self, engine: str) -> None:
        """Expect an engine no more: it was removed."""
        self._resumed.pop(engine, None)

    def kept_until_ns(self, engine: str) -> int:
        """Return until when the history had an engine when the service began (wall ns), or 0 if it did not."""
        return self._kept_until_ns.get(engine, 0)

    def next_of(self, engine: str, epoch: int) -> int:
        """Return the next batch of that epoch of an engine that its ledger lacks, or -1 if none was received before."""
        ledger = self._watch.fleet.engines.get(engine)
        return ledger.sequence + 1 if ledger is not None and ledger.ready and ledger.epoch == epoch else -1

    def unkept(self, engine: str, epoch: int) -> int:
        """Return the first batch of that epoch of an engine that the history lacks: 0 if the engine was received last
        in an earlier epoch, or else -1, which means that it is not known.
        """
        ledger = self._watch.fleet.engines.get(engine)
        return 0 if ledger is not None and 0 < ledger.epoch < epoch else -1
