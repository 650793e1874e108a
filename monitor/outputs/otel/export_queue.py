"""A bounded queue before the exporter of an OTLP endpoint, in a thread of its own: failed exports are retried, losses
are counted, and no caller waits.

    grpc://HOST:4317      OTLP/gRPC, in clear
    grpcs://HOST:4317     OTLP/gRPC over TLS
    http(s)://HOST:4318   OTLP/HTTP, protobuf; /v1/traces, /v1/logs and /v1/metrics are added

Headers, certificates, compression and timeouts are set by OpenTelemetry's own environment (OTEL_EXPORTER_OTLP_…).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter as GrpcLogs
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcTraces
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter as HttpLogs
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpTraces

from ...base.errors import KvscopeError
from ...base.http_url import PORTS, http_url
from ...base.supervision import BEAT_EVERY_S, SupervisedThread, Supervisor

logger = logging.getLogger(__name__)

OTLP_TIMEOUT_S: Final = 5.0
"""Timeout of one try, unless OTEL_EXPORTER_OTLP_TIMEOUT gives another. A try without an answer by then is repeated."""
_PATHS: Final = ("/v1/traces", "/v1/logs", "/v1/metrics")


class BadEndpoint(KvscopeError, ValueError):
    """An invalid address. The message names the valid forms."""


class Exporter(Protocol):
    """The interface of the exporters. `export` answers with an enum whose name is SUCCESS if all has arrived."""

    def export(self, batch: Any, /) -> Any:
        """Send it, within the timeout."""

    def shutdown(self) -> None:
        """Send no more. A try that waits gives up."""


class Exporters(NamedTuple):
    """One for each signal."""

    traces: Exporter
    logs: Exporter
    metrics: Exporter


def exporters_for(url: str) -> Exporters:
    """Return the exporters for an address. Raises BadEndpoint."""
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme in PORTS:
            http_url(url)
    except ValueError as error:
        raise BadEndpoint(_refusal(url)) from error
    if not parts.hostname or parts.scheme not in ("grpc", "grpcs", "http", "https"):
        raise BadEndpoint(_refusal(url))
    timeout = _timeout()
    if parts.scheme in ("grpc", "grpcs"):
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        target, clear = f"{host}:{port or 4317}", parts.scheme == "grpc"
        return Exporters(
            GrpcTraces(target, insecure=clear, timeout=timeout),
            GrpcLogs(target, insecure=clear, timeout=timeout),
            GrpcMetrics(target, insecure=clear, timeout=timeout),
        )
    base = url.rstrip("/")
    for path in _PATHS:
        base = base.removesuffix(path)
    traces, logs, metrics = (base + path for path in _PATHS)
    return Exporters(
        HttpTraces(traces, timeout=timeout), HttpLogs(logs, timeout=timeout), HttpMetrics(metrics, timeout=timeout)
    )


def _timeout() -> float:
    """Seconds, as OpenTelemetry's Python reads it."""
    try:
        return float(os.environ.get("OTEL_EXPORTER_OTLP_TIMEOUT", OTLP_TIMEOUT_S))
    except ValueError as error:
        raise BadEndpoint(f"OTEL_EXPORTER_OTLP_TIMEOUT is not a number of seconds: {error}") from error


def _refusal(url: str) -> str:
    return f"{url!r} is no OTLP endpoint: give grpc://HOST:4317, grpcs://HOST:4317 or http(s)://HOST:4318"


Item = TypeVar("Item")

RETRY_S: Final = 1.0
MOST_RETRY_S: Final = 10.0
GIVE_UP_S: Final = 120.0
"""A batch that has not arrived by then is dropped: it may be what the collector refuses, and others wait behind it."""
CLOSE_S: Final = 3.0
EXPORT_WITHIN_S: Final = 60.0
"""For one try and the pause after it. The exporters' own timeout is 10 s."""
IDLE_QUEUE_S: Final = 60.0
"""Between looks at an empty queue. An item ends the wait at once."""


class Pace(NamedTuple):
    """How often, and how long, a batch is tried."""

    retry_s: float = RETRY_S
    most_retry_s: float = MOST_RETRY_S
    give_up_s: float = GIVE_UP_S


class Sending(NamedTuple):
    """What the senders of one outlet share."""

    pace: Pace
    reasons: Reasons
    supervisor: Supervisor


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
        """Stop listening to the exporter's log. This is not `close`, because logging closes every handler when it is
        configured again, as the web server does at its start.
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
        sending: Sending,
        *,
        capacity: int,
        batch: int,
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
        self._pace = sending.pace
        self._reasons = sending.reasons
        self._queue: deque[tuple[Item, int]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        self._thread = SupervisedThread(
            f"OTLP {signal} queue", "delivery", self._turn, sending.supervisor, within_s=EXPORT_WITHIN_S
        )
        self._thread.start()

    def put(self, item: Item, weight: int = 1) -> None:
        """Queue it. Never waits."""
        with self._changed:
            self._queue.append((item, weight))
            self.waiting += weight
            while self.waiting > self.capacity and self._queue:
                self.waiting -= self._queue.popleft()[1]
                self.dropped += 1
        self._thread.wake()

    def begin_to_close(self) -> None:
        """Send the waiting items, and take no pause after a try that fails."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.wake()

    def close(self, until_s: float) -> None:
        """Wait until the waiting items were sent, or until that time (monotonic), and drop the rest."""
        self._thread.join(max(0.0, until_s - time.monotonic()))
        self._exporter.shutdown()  # a try that waits gives up
        self._thread.stop()
        self._drop_rest()

    def _drop_rest(self) -> None:
        with self._changed:
            self.dropped += len(self._queue)
            self._queue.clear()
            self.waiting = 0

    def _turn(self) -> float | None:
        with self._changed:
            taken = [self._queue.popleft() for _ in range(min(self._batch, len(self._queue)))]
        if not taken:
            return None if self._closing else IDLE_QUEUE_S
        arrived = False
        try:
            arrived = self._deliver([item for item, _ in taken])
        finally:
            with self._changed:
                self.waiting -= sum(weight for _, weight in taken)
                if arrived:
                    self.sent += len(taken)
                else:
                    self.dropped += len(taken)
            if self._closing and not arrived:
                self._drop_rest()
        return 0.0

    def _pauses(self, seconds: float) -> bool:
        """Wait. Return at once, with True, when it is to close."""
        until_s = time.monotonic() + seconds
        with self._changed:
            while not self._closing and (left_s := until_s - time.monotonic()) > 0:
                self._thread.beat()
                self._changed.wait(min(left_s, BEAT_EVERY_S))
            return self._closing

    def _deliver(self, items: list[Item]) -> bool:
        """Try until it has arrived. Return False after giving up."""
        batch = self._encode(items)
        if not batch:
            return True
        pause, began = self._pace.retry_s, time.monotonic()
        while True:
            self._thread.beat()
            if self._exporter.export(batch).name == "SUCCESS":
                if self._failing:
                    logger.warning("OpenTelemetry %s arrive again", self.signal)
                self._failing = False
                return True
            if not self._failing:
                why = self._reasons.here()
                logger.warning("OpenTelemetry %s do not arrive. They wait and are sent again. %s", self.signal, why)
            self._failing = True
            if self._pauses(pause):
                return False
            if time.monotonic() - began > self._pace.give_up_s:
                return False
            pause = min(2 * pause, self._pace.most_retry_s)
