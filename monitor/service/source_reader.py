"""Reads one source into the watch on a thread of its own, whatever the source raises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from typing import Final, Literal

from ..base.supervision import SupervisedThread, pause_after
from ..contract.samples import Record, Sample
from ..contract.wire import Batch, Keyframe
from ..history.retention import Keeper
from ..ledger.engine_ledger import EngineLedger
from ..questions.pipeline import Pipeline
from ..questions.schema import SourceView
from ..sources.live_stream import Received
from ..sources.source import POLL_WAIT_S, READ_ERRORS, Source
from ..sources.targets import TargetKind

BUILT_IN_KINDS: Final = frozenset(TargetKind)
"""A plug-in's failures are reported as blind.plugin-failed."""
JUDGED_PAST_NS: Final = 600_000_000_000
"""Detectors judge this much of a Prometheus server's past as if it came now."""
TURN_S: Final = 4.0
"""A reader's loop turns four times a second. If it has not for this long, the loop or its source hangs."""
UNHEARD_S: Final = 30.0
"""A source whose state is not known for this long is reported: it was never heard, or what it lacks does not come."""
EMPTY_TURN_S: Final = 0.5
"""Without a record, keeping and delivering are tried again this often: most turns of a quiet engine are empty."""
BLOCKS_LONGER_S: Final = 0.2
"""Beyond the time for which a source may block."""


class SourceReader:
    """Reads `source` into `watch` until stopped or at its end. With a `keeper`, it keeps everything first.

    `before` gets the records before the watch does. `after` runs once they are applied.
    """

    def __init__(
        self,
        source: Source,
        watch: Pipeline,
        keeper: Keeper | None = None,
        before: Callable[[list[Record]], None] = lambda _records: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self.target = source.status().target
        self.watch = watch
        self.error = ""
        """Why the last attempt to read failed. Empty once one worked."""
        self.failures = 0
        """Attempts that raised."""
        self.cpu_s = 0.0
        self._source = source
        self._keeper = keeper
        self._before = before
        self._after = after
        self._is_abandoned = False
        self._is_open = False
        self._is_settled = False
        """Whether detectors have seen the end of a source that has one."""
        self._attempts = 0
        """That failed in a row."""
        self._last_contained = ("", 0)
        self._in_step_s = 0.0
        """When its state was last known, or reading began (monotonic)."""
        self._took_s = -EMPTY_TURN_S
        """When it last kept, fed and delivered (monotonic)."""
        self._worker = f"reader {self.target}"
        self.thread = SupervisedThread(
            self._worker,
            "reader",
            self._turn,
            watch.supervisor,
            within_s=max(TURN_S, source.blocks_s + BLOCKS_LONGER_S),
            ending=source.close,
            engines=self._engines,
        )
        self.start = self.thread.start
        self.workers = (
            self._worker,
            self.thread.failure_worker,
            f"delivery of {self.target}",
            f"history of {self.target}",
        )
        """Under these names it reports how it is."""

    def stored(self, engine: str, since_ns: int, until_ns: int) -> list[Sample]:
        """Return what its source kept of an engine from before it was read. Raises SourceError."""
        return self._source.stored(engine, since_ns, until_ns)

    def _turn(self) -> float | None:
        """Read once, until the source's end. An attempt that raises is logged once, counted and repeated."""
        try:
            if self._source.status().ended:
                self.watch.settle()
                self._contained("delivery", self._after)
                self._is_settled = True
                return None
            self._read_once()
        except Exception as error:
            if self._is_abandoned:
                return None
            self._failed(error)
            return pause_after(self._attempts)
        except BaseException:
            self._attempts += 1  # what was being read may be lost: the source begins again
            raise
        finally:
            self.cpu_s = time.thread_time()
        return 0.0

    def _read_once(self) -> None:
        self._in_step_s = self._in_step_s or time.monotonic()
        if not self._is_open:
            self._source.open()
            self._is_open = True
        if self._attempts:
            self._source.restart(from_keyframe=self._attempts > 1)
        records = list(self._source.poll(POLL_WAIT_S))
        if self._is_abandoned:
            return
        now_s = time.monotonic()
        if records or now_s - self._took_s >= EMPTY_TURN_S:
            self._took_s = now_s
            self._take(records)
        status = self._source.status()
        if status.in_step:
            self._in_step_s = now_s
        is_silent = not status.error and self._is_out_of_step() and self._source.sends_when_idle
        if is_silent:
            self.error = self._source.explain_silence(UNHEARD_S)
            self._report_contained(self.error, status.skipped)
        elif status.error and not status.in_step and status.kind in BUILT_IN_KINDS:
            self._report_contained(status.error, status.skipped)
        elif not self.error or records or status.in_step:
            self.error = ""
            self._attempts = 0
            self._last_contained = ("", 0)
            self.watch.report_recovery(self._worker)

    def _take(self, records: list[Record]) -> None:
        """Keep records, feed them to the watch, and deliver what it finds."""
        if self._keeper is not None:
            self._contained("history", partial(self._keep, self._keeper, records))
        self._contained("delivery", partial(self._before, records))
        self._feed(records)
        self._contained("delivery", self._after)

    def _feed(self, records: Sequence[Record]) -> None:
        """Feed the watch. Samples that a Prometheus server stored long before are history: they are shown, and
        detectors do not judge them.
        """
        begin_ns = time.time_ns() - JUDGED_PAST_NS if self._source.status().kind == TargetKind.PROMETHEUS else 0

        def is_stored(record: Record) -> bool:
            return isinstance(record, Sample) and 0 < (record.at_ns or 0) < begin_ns

        records = list(_from_state_on(records, self.watch.fleet.engines))
        self.watch.learn(filter(is_stored, records))
        self.watch.feed(filterfalse(is_stored, records))

    def _report_contained(self, error: str, failed: int) -> None:
        """Report what the source contained by itself, once each time: what it shows is as old as its last success."""
        if (error, failed) != self._last_contained:
            self._last_contained = (error, failed)
            self._report(error)

    def _report(self, error: str | Exception) -> None:
        """Report that it does not work: of its engines, or of itself if it has had none for too long."""
        if not self.engines() and self._is_out_of_step():
            self.watch.report_unheard(self._worker, self.target, self.error or str(error))
        else:
            self.watch.report_failure(self._worker, "reader", error, self._engines())

    def _is_out_of_step(self) -> bool:
        return self._source.grows and time.monotonic() - self._in_step_s >= UNHEARD_S

    def _contained(self, kind: Literal["delivery", "history"], call: Callable[[], None]) -> None:
        """Call what comes beside reading: when it raises, reading goes on."""
        worker = f"{kind} of {self.target}"
        try:
            call()
        except Exception as error:
            self.watch.report_failure(worker, kind, error, self._engines())
        else:
            self.watch.report_recovery(worker)

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        self._attempts += 1
        expected = isinstance(error, READ_ERRORS)
        self.error = str(error) if expected else f"{type(error).__name__}: {error}"
        self._report(self.error if expected else error)

    def _engines(self) -> tuple[str, ...]:
        """Return the engines that depend on this source, or a name that no engine has before any is known."""
        return self.engines() or (self.target,)

    def _keep(self, keeper: Keeper, records: Sequence[Record]) -> None:
        """Keep records before the watch uses them: the frames by engine, or the ledgers' points where no frame came."""
        frames = [record for record in records if isinstance(record, Batch | Keyframe)]
        engines = self.watch.fleet.engines
        by_engine: dict[str, list[Received]] = {}
        if self._source.has_events:
            by_engine = {engine: [] for engine in self._source.status().engines}
        for frame in frames:
            by_engine.setdefault(frame.engine, []).append(Received(frame, self._source.payload_of(frame)))
        for engine, received in by_engine.items():
            keeper.keep(received, engines.get(engine))
        keeper.note([record for record in records if not isinstance(record, Batch | Keyframe)])

    def engines(self) -> tuple[str, ...]:
        """Return every engine that the source brought, or none if the source cannot report them."""
        try:
            return tuple(self._source.status().engines)
        except Exception:
            return ()

    def leave(self, within_s: float) -> bool:
        """End it, and wait until it has, beyond the time for which its source may block for `within_s` at most.

        Whether it has ended. One that has not is left behind: what its source returns later is dropped.
        """
        self._is_abandoned = not self._stop(self._source.blocks_s + within_s)
        return not self._is_abandoned

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stop(None)

    def _stop(self, within_s: float | None) -> bool:
        if not self.thread.was_started:
            self._source.close()
        return self.thread.stop(within_s)

    def view(self) -> SourceView:
        """Report how the source and its reading are."""
        status = self._source.status()
        error = self.error or self.thread.failure
        not_kept = self._keeper.error(status.engine) if self._keeper is not None else ""
        return SourceView(
            status.target,
            status.engine,
            status.in_step and (self._is_settled or not status.ended) and not error,
            status.skipped,
            dict(status.filled_from),
            error or status.error or not_kept or (status.ended and "; ".join(status.notes)) or "",
            ended=bool(status.ended and (error or status.error)),
            lag_s=status.lag_s,
            cpu_s=self.cpu_s,
            kind=status.kind,
            engines=list(status.engines),
            failures=self.failures,
            notes=list(status.notes),
        )


def _from_state_on(records: Iterable[Record], ledgers: Mapping[str, EngineLedger]) -> Iterator[Record]:
    """Leave out batches from before an engine's first keyframe: they are kept, and no ledger can use them."""
    begun = {engine for engine, ledger in ledgers.items() if ledger.epoch}
    for record in records:
        if isinstance(record, Keyframe) or (isinstance(record, Batch) and record.sequence == 0):
            begun.add(record.engine)
        if not isinstance(record, Batch) or record.sequence <= 0 or record.engine in begun:
            yield record
