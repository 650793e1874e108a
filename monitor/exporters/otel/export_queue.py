"""A bounded queue before an exporter, in a thread of its own: failed exports are retried, losses are counted, and no
caller waits.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvscope.monitor.exporters.otel.otlp_exporters import Exporter

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 10.0
GIVE_UP_S: Final = 120.0
"""A batch that has not arrived by then is dropped: it may be what the collector refuses, and others wait behind it."""
CLOSE_S: Final = 3.0


class Pace(NamedTuple):
    """How often, and how long, a batch is tried."""

    retry_s: float = RETRY_S
    most_retry_s: float = MOST_RETRY_S
    give_up_s: float = GIVE_UP_S


class Reasons(logging.Handler):
    """The last log lines of exporters, in each thread. They repeat the line at every try. It is logged once, and the
    counters show the rest.

    The line before the last gives the reason, and the last only that the exporter gave up, so both are kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=2))
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.propagate = False
        exporters.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self._logged[record.threadName or ""].append(record.getMessage())

    def here(self) -> str:
        """Return the last reason in this thread."""
        return " ".join(self._logged[threading.current_thread().name]) or "no reason is known"

    def stop(self) -> None:
        """Listen no longer. It is not `close`, which logging calls on every handler when it is configured again, as the
        web server does at its start.
        """
        logging.getLogger("opentelemetry.exporter").removeHandler(self)
        self.close()


class ExportSender(Generic[Item]):
    """Sends items of one `signal`, `batch` at a time at most, made into what the exporter takes by `encode`.

    Each item has a weight. Items of `capacity` in all may wait. When more come, the oldest are dropped.
    """

    def __init__(
        self,
        signal: str,
        exporter: Exporter,
        encode: Callable[[Sequence[Item]], Any],
        *,
        capacity: int,
        batch: int,
        pace: Pace,
        reasons: Reasons,
    ) -> None:
        self.signal = signal
        self.capacity = capacity
        self.sent = 0
        self.dropped = 0
        self.waiting = 0
        """Weight of what waits, the batch that is tried included."""
        self._exporter = exporter
        self._encode = encode
        self._batch = batch
        self._pace = pace
        self._reasons = reasons
        self._queue: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=f"kvscope-otlp-{signal}", daemon=True)
        self._thread.start()

    def put(self, item: Item, weight: int = 1) -> None:
        """Queue it. Never waits."""
        with self._changed:
            self._queue.append((item, weight))
            self.waiting += weight
            while self.waiting > self.capacity and self._queue:
                self.waiting -= self._queue.popleft()[1]
                self.dropped += 1
            self._changed.notify()

    def close(self) -> None:
        """Send the waiting items, for a few seconds at most, and drop the rest."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_S)
        self._exporter.shutdown()  # a try that waits gives up
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                taken = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
            if not taken:
                return
            arrived = self._deliver([item for item, _ in taken])
            with self._changed:
                self.waiting -= sum(weight for _, weight in taken)
                if arrived:
                    self.sent += len(taken)
                    continue
                self.dropped += len(taken)
                if self._closing:
                    self.dropped += len(self._queue)
                    self.waiting = 0
                    return

    def _deliver(self, items: list[Item]) -> bool:
        """Try until it has arrived. Return False after giving up."""
        batch = self._encode(items)
        if not batch:
            return True
        pause, began = self._pace.retry_s, time.monotonic()
        while True:
            if self._exporter.export(batch).name == "SUCCESS":
                if self._failing:
                    logger.warning("OpenTelemetry %s arrive again", self.signal)
                self._failing = False
                return True
            if not self._failing:
                why = self._reasons.here()
                logger.warning("OpenTelemetry %s do not arrive. They wait and are sent again. %s", self.signal, why)
            self._failing = True
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, pause):
                    return False
            if time.monotonic() - began > self._pace.give_up_s:
                return False
            pause = min(2 * pause, self._pace.most_retry_s)
