"""The workers of the service and their health: contained failures, heartbeats of loops, and threads that stay alive.

A reader, detector, exporter or page that raises is a worker that failed: the failure is contained to it, logged once,
counted, and reported as a finding, on /metrics and in the API, until the worker works again. A loop that must turn
sends heartbeats. A late one is reported the same way, and fails /healthz if it stays late.

Every thread of the service is a SupervisedThread, so that none can end unnoticed. Whatever its turn raises is a failure
of it, and the next turn follows. A thread that ended all the same is started again by `Supervisor.check`, which the
watchdog and the loop of the HTTP server call, so that each of the two looks after the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple

logger = logging.getLogger(__name__)

WorkerKind = Literal["reader", "detector", "delivery", "history", "copy", "discovery"]
LATE_FACTOR: Final = 3
"""A loop that is late by so many of its intervals fails /healthz: by then it does not come back by itself."""
MAX_ERROR_CHARS: Final = 300
FIRST_PAUSE_S: Final = 1.0
"""The pause after a turn that raised. It doubles with each further failure."""
LAST_PAUSE_S: Final = 8.0
WORKS_AFTER_S: Final = 3.0
"""A thread that failed works again once it has turned for this long: until then /healthz shows that it failed."""
BEAT_EVERY_S: Final = 1.0
"""A thread that waits sends heartbeats meanwhile."""


def pause_after(failures: int) -> float:
    """Return the seconds until the next attempt, after so many failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 10), LAST_PAUSE_S)


class WorkerFailure(NamedTuple):
    """A worker that does not work. `since_ns` is wall time, `engines` those that depend on it (none named: all)."""

    worker: str
    kind: WorkerKind
    error: str
    since_ns: int
    times: int
    engines: tuple[str, ...] = ()

    def concerns(self, engine: str) -> bool:
        """Whether an engine depends on the worker."""
        return not self.engines or engine in self.engines


class _Loop(NamedTuple):
    within_s: float
    beat_s: float


class Supervisor:
    """The workers of one pipeline. Thread-safe."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._failures: dict[str, WorkerFailure] = {}
        self._totals: dict[str, int] = {}
        self._loops: dict[str, _Loop] = {}
        self._threads: dict[str, SupervisedThread] = {}

    def failed(self, worker: str, kind: WorkerKind, error: BaseException | str, engines: Sequence[str] = ()) -> bool:
        """Record that a worker failed. Whether that is news: the first failure, or another error."""
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        text = text[:MAX_ERROR_CHARS]
        with self._lock:
            before = self._failures.get(worker)
            self._totals[worker] = self._totals.get(worker, 0) + 1
            since_ns = before.since_ns if before is not None else time.time_ns()
            times = before.times + 1 if before is not None else 1
            self._failures[worker] = WorkerFailure(worker, kind, text, since_ns, times, tuple(engines))
        is_news = before is None or before.error != text
        if is_news:
            logger.error("%s failed: %s", worker, text, exc_info=None if isinstance(error, str) else error)
        return is_news

    def works(self, worker: str) -> bool:
        """Record that a worker works. Whether that is news."""
        with self._lock:
            failure = self._failures.pop(worker, None)
        if failure is not None:
            logger.info("%s works again after %d failures", worker, failure.times)
        return failure is not None

    @property
    def has_failures(self) -> bool:
        """Whether any worker does not work."""
        return bool(self._failures)

    def failures(self, engine: str = "") -> tuple[WorkerFailure, ...]:
        """Return the workers that do not work, of those that an engine depends on if one is named."""
        with self._lock:
            return tuple(failure for failure in self._failures.values() if not engine or failure.concerns(engine))

    def totals(self) -> dict[str, int]:
        """Return how often each worker failed since the service began."""
        with self._lock:
            return dict(self._totals)

    def forget(self, names: set[str], workers: Iterable[str]) -> None:
        """Drop the failures that concern only `names`, which are watched no more, and the counts of `workers`."""
        with self._lock:
            for worker, failure in list(self._failures.items()):
                if failure.engines and names.issuperset(failure.engines):
                    del self._failures[worker]
                    self._totals.pop(worker, None)
            for worker in workers:
                self._totals.pop(worker, None)

    # ---------------------------------------------------------------- heartbeats

    def beat(self, worker: str, within_s: float) -> None:
        """Record that a loop turns, and that it should again within so many seconds."""
        with self._lock:
            self._loops[worker] = _Loop(within_s, self._monotonic_s())

    def ended(self, worker: str) -> None:
        """Expect no more heartbeats of a loop."""
        with self._lock:
            self._loops.pop(worker, None)

    def is_late(self, worker: str) -> bool:
        """Return whether a loop has not turned for longer than its interval."""
        with self._lock:
            loop = self._loops.get(worker)
        return loop is not None and self._monotonic_s() - loop.beat_s > loop.within_s

    def late(self, factor: float = 1.0) -> dict[str, float]:
        """Return the loops that are late by `factor` intervals or more, and the seconds since each last turned."""
        now = self._monotonic_s()
        with self._lock:
            ages = {worker: (now - loop.beat_s, loop.within_s) for worker, loop in self._loops.items()}
        return {worker: age_s for worker, (age_s, within_s) in ages.items() if age_s > within_s * factor}

    # ---------------------------------------------------------------- threads

    def expect(self, thread: SupervisedThread) -> None:
        """Expect a thread to run from now on."""
        with self._lock:
            self._threads[thread.worker] = thread

    def dismiss(self, thread: SupervisedThread) -> None:
        """Expect a thread no more."""
        with self._lock:
            if self._threads.get(thread.worker) is thread:
                del self._threads[thread.worker]
        self.ended(thread.worker)

    def threads(self) -> list[SupervisedThread]:
        """Return the threads that should run: not those that were asked to stop and may have ended already."""
        with self._lock:
            return [thread for thread in self._threads.values() if not thread.is_stopping]

    def check(self) -> None:
        """Start the threads again that should run and do not, and report those that hang."""
        for thread in self.threads():
            thread.check()

    def health(self) -> ThreadsHealth:
        """Compare the threads that should run with those that do."""
        threads = self.threads()
        return ThreadsHealth(
            expected=len(threads),
            running=sum(thread.is_running for thread in threads),
            failing=sorted(thread.worker for thread in threads if thread.failure or thread.has_ended),
        )


class ThreadsHealth(NamedTuple):
    """How many threads should run, how many do, and the workers of those that ended or failed just now."""

    expected: int
    running: int
    failing: list[str]


class SupervisedThread:
    """A thread that calls `turn` again and again until it is stopped, or until `turn` returns None.

    turn: returns the seconds until the next turn, which `wake` cuts short. Whatever it raises, SystemExit and
    MemoryError included, is recorded as a failure of `worker`, and the next turn follows after a pause.
    within_s: how long a turn may take without a `beat` before it counts as late.
    ending: called in the thread when it was stopped, or after its last turn.
    engines: those that depend on it (none: all).
    """

    def __init__(
        self,
        worker: str,
        kind: WorkerKind,
        turn: Callable[[], float | None],
        supervisor: Supervisor,
        *,
        within_s: float,
        ending: Callable[[], None] = lambda: None,
        engines: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.worker = worker
        self.failure = ""
        """Why its last turn raised or is late, until it has turned for WORKS_AFTER_S since. Empty while all is well."""
        self._kind = kind
        self._turn = turn
        self._supervisor = supervisor
        self._within_s = within_s
        self._ending = ending
        self._engines = engines
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._checking = threading.Lock()
        self._is_done = False
        """Whether its last turn was the last of all."""
        self._thread: threading.Thread | None = None
        self._pause_s = 0.0
        self._failures = 0
        """In a row."""
        self._turning_since_s = float("inf")
        """Since when it turns without a failure (monotonic)."""

    def start(self) -> None:
        """Begin to turn. Raises RuntimeError if the system has no further thread."""
        with self._checking:  # or a check would start it a second time, as it is expected and does not run yet
            self._supervisor.expect(self)
            self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"kvscope {self.worker}", daemon=True)
        self.beat()
        try:
            self._thread.start()
        except RuntimeError:  # the system has no further thread
            self._thread = None
            raise

    @property
    def was_started(self) -> bool:
        """Whether it was ever started."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the thread runs now."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def has_ended(self) -> bool:
        """Whether the thread runs no more. One that is about to begin has not ended."""
        thread = self._thread
        return thread is not None and thread.ident is not None and not thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop. A long turn asks."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Let the next turn begin now. Any thread, and a signal handler, may call it."""
        self._woken.set()

    def ask_to_stop(self) -> None:
        """Let it end after the turn under way."""
        self._stopping.set()
        self._woken.set()

    def stop(self, within_s: float | None = None) -> bool:
        """End it, and wait until it has, for `within_s` at most. Return whether it has ended."""
        self.ask_to_stop()
        self.join(within_s)
        self._supervisor.dismiss(self)
        return not self.is_running

    def join(self, within_s: float | None = None) -> None:
        """Wait until it has ended, for `within_s` at most."""
        if self._thread is not None:
            self._thread.join(within_s)

    def beat(self) -> None:
        """Record that it turns. A turn that takes long calls it."""
        if self._stopping.is_set():  # nobody waits for it any more
            return
        self._supervisor.beat(self.worker, self._within_s)
        if self.failure and time.monotonic() - self._turning_since_s >= WORKS_AFTER_S:
            self.failure = ""
            self._supervisor.works(self.failure_worker)

    @property
    def failure_worker(self) -> str:
        """The name under which failures of the thread itself are reported."""
        return f"the thread of {self.worker}"

    def check(self) -> None:
        """Start it again if it has ended though it should run, and report it if it hangs. Any other thread calls it."""
        with self._checking:
            self._check()

    def _check(self) -> None:
        if self._stopping.is_set() or self._is_done:
            return
        if not self.is_running:
            self._fail("it ended, and is started again")
            try:
                self._start()
            except RuntimeError as error:  # no thread can be started just now
                self._fail(error)
        elif not self.failure and self._supervisor.is_late(self.worker):
            self._report(f"its loop has not turned for {self._within_s:g} s: it, or a step in it, hangs")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._wait_for_turn()
                if self._stopping.is_set():
                    break
                self._woken.clear()  # before the turn, so that a wake during it brings another
                if self._turning_since_s == float("inf"):
                    self._turning_since_s = time.monotonic()
                self.beat()
                pause_s = self._turn()
                if pause_s is None:
                    self._is_done = True
                    self._supervisor.dismiss(self)
                    break
                self._pause_s, self._failures = pause_s, 0
            except BaseException as error:  # SystemExit and MemoryError must not end it either
                self._fail(error)
        self._end()

    def _wait_for_turn(self) -> None:
        until_s = time.monotonic() + self._pause_s
        woken = self._stopping if self._failures else self._woken  # a wake does not shorten the pause after a failure
        while not woken.is_set() and (left_s := until_s - time.monotonic()) > 0:
            self.beat()
            woken.wait(min(left_s, BEAT_EVERY_S))

    def _fail(self, error: BaseException | str) -> None:
        self._turning_since_s = float("inf")
        self._failures += 1
        self._pause_s = pause_after(self._failures)
        self._report(error)

    def _report(self, error: BaseException | str) -> None:
        self.failure = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self._supervisor.failed(self.failure_worker, self._kind, error, self._engines())

    def _end(self) -> None:
        try:
            self._ending()
        except Exception:
            logger.exception("%s did not end well", self.worker)
