"""Sees from outside when requests, or the whole engine, no longer move.

It runs in a thread of its own and only reads, so it still speaks when the engine's thread hangs in a step. A request
stalls when its state, its last step and its computed tokens have stayed the same for `stall_s`. The watchdog reports
that once to the event stream and the log, and again only after it moved in between. The engine stalls when there is
work and no step was launched for as long, or one is in flight for as long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from kvscope.monitor.contract.event_log import Clock, EventLog
from kvscope.monitor.contract.kinds import Cause, Status

from ..requests.request import Request
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

RequestProgress = tuple[Status, int, int]
"""The values that change when a request moves: status, the last step it took part in, computed tokens."""


class RequestStall(NamedTuple):
    """A request that does not move: in which state, since which step (-1: before any) and monotonic ns, and why."""

    number: int
    request: str
    status: Status
    since_step: int
    since_ns: int
    cause: Cause


class Watchdog:
    """Watches what `scheduler` has. `launched` gives the step in flight (-1: none) and its start in monotonic ns."""

    def __init__(
        self,
        scheduler: Scheduler,
        log: EventLog,
        launched: Callable[[], tuple[int, int]],
        stall_s: float,
        clock: Clock = time,
    ) -> None:
        self.scheduler = scheduler
        self.log = log
        self.stall_s = stall_s
        self.stalled: dict[int, RequestStall] = {}
        """Requests that are stalled now, by number, replaced as a whole at each check."""
        self.engine_stalled_s = 0.0
        """For how long the whole engine has not moved, or 0 unless that is at least `stall_s`."""
        self._launched = launched
        self._clock = clock
        self._seen: dict[int, tuple[RequestProgress, int]] = {}
        self._step = -1
        self._step_ns = clock.monotonic_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look, a few times in each `stall_s`."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(min(1.0, self.stall_s / 4)):
            self.look()

    def look(self) -> None:
        """Check which requests have moved since the last check, and report those that have not for too long."""
        now = self._clock.monotonic_ns()
        limit = round(self.stall_s * 1e9)
        living = [request for request in list(self.scheduler.requests.values()) if not request.is_finished]
        if self.scheduler.step != self._step:
            self._step, self._step_ns = self.scheduler.step, now
        in_flight, in_flight_ns = self._launched()
        step_hangs = in_flight >= 0 and now - in_flight_ns >= limit
        head_is_refused = any(other.times_passed_over for other in list(self.scheduler.waiting))
        seen: dict[int, tuple[RequestProgress, int]] = {}
        stalled: dict[int, RequestStall] = {}
        for request in living:
            mark = (request.status, request.progressed_step, request.num_computed_tokens)
            before = self._seen.get(request.number)
            since = before[1] if before is not None and before[0] == mark else now
            seen[request.number] = mark, since
            if now - since >= limit:
                cause = Cause.STEP_IN_FLIGHT if step_hangs else self._cause(request, head_is_refused)
                stalled[request.number] = RequestStall(
                    request.number, request.id, request.status, request.progressed_step, since, cause
                )
        for number in stalled.keys() - self.stalled.keys():
            self._report(stalled[number], now)
        # An engine that had nothing to do did not stall meanwhile.
        still_ns = now - max(self._step_ns, min((since for _, since in seen.values()), default=now))
        self._seen, self.stalled = seen, stalled
        self.engine_stalled_s = still_ns / 1e9 if still_ns >= limit else 0.0

    def _cause(self, request: Request, head_is_refused: bool) -> Cause:
        """Why the scheduler leaves it where it is."""
        if request.status == Status.RUNNING:
            return request.cause or Cause.ZERO_TOKENS
        if request.times_passed_over or request.number in self.scheduler.parked:
            return request.cause
        return Cause.BEHIND_HEAD if head_is_refused else request.cause

    def _report(self, stall: RequestStall, now: int) -> None:
        self.log.stalled(stall.number, stall.status, stall.since_step, stall.cause)
        since = f"step {stall.since_step}" if stall.since_step >= 0 else "it arrived"
        logger.warning(
            "Request %s has made no progress for %.1f s, since %s: %s, %s",
            stall.request,
            (now - stall.since_ns) / 1e9,
            since,
            stall.status.name,
            stall.cause.name,
        )
