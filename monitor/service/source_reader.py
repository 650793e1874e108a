"""Reads one source into the watch on a thread of its own, whatever the source raises."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvscope.monitor.events.samples import Record
from kvscope.monitor.events.wire import Batch, Keyframe
from kvscope.monitor.history.retention import Keeper
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.schema import SourceView
from kvscope.monitor.sources.live_stream import Received
from kvscope.monitor.sources.source import POLL_WAIT_S, READ_ERRORS, Source

logger = logging.getLogger(__name__)

PAUSE_S: Final = 1.0
"""Between a failure and the next attempt."""


class SourceReader(threading.Thread):
    """Reads `source` into `watch` until stopped or at its end; with a `keeper`, everything is kept first.

    `before` gets the records before the watch does; `after` runs when they were applied.
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
        super().__init__(name=f"kvscope-read {self.target}", daemon=True)
        self.watch = watch
        self.error = ""
        """Why the last attempt to read failed; empty once one worked."""
        self.failures = 0
        """Attempts that raised."""
        self.cpu_s = 0.0
        self._source = source
        self._keeper = keeper
        self._before = before
        self._after = after
        self._stopping = threading.Event()
        self._is_open = False

    def run(self) -> None:
        """Read until stopped or at the source's end. An attempt that raises is logged once, counted and repeated."""
        try:
            while not self._stopping.is_set() and not self._source.status().ended:
                try:
                    self._read_once()
                except Exception as error:
                    self._failed(error)
                    self._stopping.wait(PAUSE_S)
                self.cpu_s = time.thread_time()
            if self._source.status().ended:
                self.watch.settle()
                self._after()
        finally:
            self._source.close()

    def _read_once(self) -> None:
        if not self._is_open:
            self._source.open()
            self._is_open = True
        records = list(self._source.poll(POLL_WAIT_S))
        if self._keeper is not None:
            self._keep(self._keeper, records)
        self._before(records)
        self.watch.feed(records)
        self._after()
        if self.error and (records or self._source.status().in_step):
            logger.info("%s: reading works again", self.target)
            self.error = ""

    def _failed(self, error: Exception) -> None:
        self.failures += 1
        text = str(error) if isinstance(error, READ_ERRORS) else f"{type(error).__name__}: {error}"
        if text != self.error:
            logger.error("%s: %s", self.target, text, exc_info=None if isinstance(error, READ_ERRORS) else error)
        self.error = text

    def _keep(self, keeper: Keeper, records: Sequence[Record]) -> None:
        """Keep records before anything is made of them, the frames by engine; where none came, the ledgers' points."""
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

    def stop(self) -> None:
        """End it, and wait until it has."""
        self._stopping.set()
        if self.ident is not None:
            self.join()
        else:
            self._source.close()

    def view(self) -> SourceView:
        """Report how the source and its reading are."""
        status = self._source.status()
        not_kept = self._keeper.error(status.engine) if self._keeper is not None else ""
        return SourceView(
            status.target,
            status.engine,
            status.in_step and not self.error,
            status.skipped,
            dict(status.filled_from),
            self.error or status.error or not_kept or (status.ended and "; ".join(status.notes)) or "",
            ended=bool(status.ended and (self.error or status.error)),
            lag_s=status.lag_s,
            cpu_s=self.cpu_s,
            kind=status.kind,
            engines=list(status.engines),
            failures=self.failures,
            notes=list(status.notes),
        )
