"""Takes the points of all engines from their ledgers, spools them, and sends them with Prometheus remote write 1.0.

One thread spools every SPOOL_EVERY_S, another sends. A request that fails waits and is tried again. One whose content
the store refuses is dropped and counted, for repeating it helps nothing. A wrong token or path is no reason to drop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import httpx
import msgspec

from kvscope.monitor.bounded_http import bounded_client, describe_failure, status_text
from kvscope.monitor.errors import BadTarget
from kvscope.monitor.exporters.remote_write.spool import SPOOL_BYTES, Spool, SpooledRequest
from kvscope.monitor.exporters.remote_write.write_request import HEADERS, encode_points
from kvscope.monitor.ledger.engine_ledger import Point
from kvscope.monitor.pipeline import Pipeline

logger = logging.getLogger(__name__)

SPOOL_EVERY_S: Final = 5.0
WRITE_TIMEOUT_S: Final = 15.0
WRITE_RETRY_S: Final = 1.0
LONGEST_WRITE_RETRY_S: Final = 60.0
WRITE_BEHIND_S: Final = 300.0
REPORT_LOST_POINTS_S: Final = 3600.0
POINTS_A_REQUEST: Final = 500
"""With 18 series each: 9,000 samples, as Prometheus sends them."""
WRITE_ANSWER_BYTES: Final = 1 << 16
ERROR_CHARS: Final = 200
SENT_FILE: Final = "spooled.json"
REFUSED: Final = (400, 409, 413, 415, 422)
"""Answers that are about the content of a request."""


class RemoteWriteConfig(NamedTuple):
    """Where points go. `token` is sent as a bearer token. A user and password may be in the URL."""

    url: str
    token: str = ""
    spool_bytes: int = SPOOL_BYTES
    spool_every_s: float = SPOOL_EVERY_S
    retry_s: float = WRITE_RETRY_S


class RemoteWriteFigures(NamedTuple):
    """How far remote write is: points since the service began, and what waits."""

    sent: int
    rejected: int
    dropped: int
    failures: int
    waiting_bytes: int
    waiting_s: float
    """For how long the oldest request has waited, 0 without any."""


class RemoteWriter:
    """Writes the points of `watch` to `config.url`, with a spool in `directory`. `start` it, and `stop` it.

    Raises BadTarget for a URL that is none, and ValueError if the directory cannot be written.
    """

    def __init__(
        self, config: RemoteWriteConfig, watch: Pipeline, directory: Path, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._config = config
        self._watch = watch
        self._wall_ns = wall_ns
        url = remote_write_url(config.url)
        self.name = str(url.copy_with(userinfo=b"", query=None))
        """The URL without what may be secret."""
        self._url = url
        try:
            self._spool = Spool(directory, config.spool_bytes)
        except OSError as error:
            raise ValueError(f"{directory} cannot be written: {error.strerror}. Name another with --data") from error
        self._sent_path = directory / SENT_FILE
        self._until_ns = self._read_spooled()
        """The last spooled point of each engine (wall ns)."""
        self._lock = threading.Lock()
        self._sent = self._rejected = self._dropped = self._failures = 0
        self._lost_s = 0.0
        self._send_error = self._spool_error = ""
        self._stopping = threading.Event()
        self._spooled = threading.Event()
        headers = {**HEADERS, **({"Authorization": f"Bearer {config.token}"} if config.token else {})}
        self._client = bounded_client(WRITE_TIMEOUT_S, WRITE_ANSWER_BYTES, headers)
        self._threads = [
            threading.Thread(target=run, name=f"kvscope-remote-write-{name}", daemon=True)
            for name, run in (("spool", self._run_spool), ("send", self._run_send))
        ]

    def start(self) -> None:
        """Begin to spool and to send."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Spool what is new, and end after the request that is under way."""
        self._stopping.set()
        self._spooled.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._client.close()

    def figures(self) -> RemoteWriteFigures:
        """Return how far it is. Any thread."""
        oldest = self._spool.oldest()
        waiting_s = max(0.0, (self._wall_ns() - oldest.at_ns) / 1e9) if oldest is not None else 0.0
        with self._lock:
            return RemoteWriteFigures(
                self._sent, self._rejected, self._dropped, self._failures, self._spool.bytes(), waiting_s
            )

    def problem(self) -> str:
        """Return why points do not arrive as they should, or empty if all do. Any thread."""
        figures, problems = self.figures(), []
        with self._lock:
            send_error, spool_error, lost_s = self._send_error, self._spool_error, self._lost_s
        if send_error:
            problems.append(f"points do not reach {self.name} and are sent again: {send_error}")
        elif figures.waiting_s > WRITE_BEHIND_S:
            problems.append(f"{self.name} is behind: points have waited for more than {WRITE_BEHIND_S / 60:g} min")
        if spool_error:
            problems.append(f"points cannot be spooled: {spool_error}")
        if lost_s and time.monotonic() - lost_s < REPORT_LOST_POINTS_S:
            problems.append(f"points for {self.name} were lost: the spool was full, or the store rejected them")
        return "; ".join(problems)

    # ---------------------------------------------------------------- spooling

    def _run_spool(self) -> None:
        while True:
            is_last = self._stopping.wait(self._config.spool_every_s)
            try:
                self.spool()
                self._spool_error = ""
            except OSError as error:  # they stay in the ledger, and are spooled when there is room
                self._spool_error = str(error.strerror)
            except Exception as error:  # the thread goes on: it is the only one that spools
                logger.exception("points could not be spooled")
                self._spool_error = f"{type(error).__name__}: {error}"
            if is_last:
                return

    def spool(self) -> None:
        """Spool the points that are new since the last call. Raises OSError."""
        new = self._new_points()
        for points in _points_by_request(new):
            count = sum(map(len, points.values()))
            lost = self._spool.append(encode_points(points), count, self._wall_ns())
            self._until_ns |= {engine: of_engine[-1].at_ns for engine, of_engine in points.items()}
            if lost:
                self._note_lost(dropped=lost)
        if new:
            self._write_spooled()
            self._spooled.set()

    def _new_points(self) -> dict[str, list[Point]]:
        new: dict[str, list[Point]] = {}
        with self._watch.locked():
            for engine, ledger in self._watch.fleet.engines.items():
                until_ns, points = self._until_ns.get(engine, 0), []
                for point in reversed(ledger.points):
                    if point.at_ns <= until_ns:
                        break
                    points.append(point)
                if points:
                    new[engine] = points[::-1]
        return new

    def _read_spooled(self) -> dict[str, int]:
        try:
            return msgspec.json.decode(self._sent_path.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}

    def _write_spooled(self) -> None:
        new = self._sent_path.with_name(f".{SENT_FILE}.new")
        new.write_bytes(msgspec.json.encode(self._until_ns))
        new.replace(self._sent_path)

    # ---------------------------------------------------------------- sending

    def _run_send(self) -> None:
        pause_s = self._config.retry_s
        while not self._stopping.is_set():
            request = self._spool.oldest()
            if request is None:
                self._spooled.wait()
                self._spooled.clear()
                continue
            if self._send(request):
                pause_s = self._config.retry_s
                continue
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, LONGEST_WRITE_RETRY_S)

    def _send(self, request: SpooledRequest) -> bool:
        """Send one request, or False if it is to be tried again."""
        try:
            answer = self._client.post(self._url, content=request.path.read_bytes())
        except FileNotFoundError:  # the bound has removed it meanwhile
            return True
        except (httpx.HTTPError, OSError) as error:
            self._note_failure(describe_failure(error) if isinstance(error, httpx.HTTPError) else str(error.strerror))
            return False
        if not answer.is_success and answer.status_code not in REFUSED:
            self._note_failure(status_text(answer.status_code))
            return False
        self._spool.remove(request)
        with self._lock:
            self._send_error = ""
            if answer.is_success:
                self._sent += request.points
        if not answer.is_success:
            text = answer.text[:ERROR_CHARS]
            logger.error("%s refused %d points: %s", self.name, request.points, f"{answer.status_code} {text}")
            self._note_lost(rejected=request.points)
        return True

    def _note_failure(self, error: str) -> None:
        with self._lock:
            self._failures += 1
            self._send_error = error

    def _note_lost(self, dropped: int = 0, rejected: int = 0) -> None:
        with self._lock:
            self._dropped += dropped
            self._rejected += rejected
            self._lost_s = time.monotonic()


def _points_by_request(new: Mapping[str, Sequence[Point]]) -> Iterator[dict[str, list[Point]]]:
    """Yield what goes into each request: POINTS_A_REQUEST points at most, of as many engines as that takes."""
    request: defaultdict[str, list[Point]] = defaultdict(list)
    pairs = ((engine, point) for engine, points in new.items() for point in points)
    for number, (engine, point) in enumerate(pairs):
        if number and number % POINTS_A_REQUEST == 0:
            yield dict(request)
            request.clear()
        request[engine].append(point)
    if request:
        yield dict(request)


def remote_write_url(text: str) -> httpx.URL:
    """Return the address of a remote store. Raises BadTarget."""
    try:
        url, host = httpx.URL(text), urlsplit(text).hostname
    except (httpx.InvalidURL, ValueError):
        url, host = httpx.URL(""), None
    if url.scheme not in ("http", "https") or not host:
        raise BadTarget("--remote-write takes http(s)://HOST/PATH, such as http://localhost:8428/api/v1/write")
    return url
