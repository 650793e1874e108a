"""Whether each unfinished request is in one of the scheduler's queues: one that is in none is never scheduled again."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.events.event_log import EventLog
from kvscope.monitor.probes.vllm.probe_state import ProbeState, status_of

CHECKS: Final = 3
"""A request on its way between two queues is in none for microseconds, not at so many heartbeats in a row."""


class QueueCheck:
    """Checks the requests of `state` from the drain thread, while the engine works or sleeps."""

    def __init__(self, state: ProbeState, log: EventLog) -> None:
        self._state = state
        self._log = log
        self._missing: dict[str, int] = {}
        """Requests that were in no queue at the last check, and at how many in a row."""

    def check(self, queued: int) -> None:
        """Report a request at the third heartbeat in a row at which it is in no queue. queued: how many are in one.

        The names are compared only if there are more unfinished requests than that.
        """
        state = self._state
        if len(state.numbers) - len(state.deferred) <= queued:
            self._missing.clear()
            return
        try:
            known = {request.request_id for request in list(state.scheduler.running)}
            for queue in state.queues():
                known.update(request.request_id for request in list(queue))
            unfinished = [name for name in list(state.numbers) if name not in known and name not in state.deferred]
        except RuntimeError:  # a queue changed while it was read: the next heartbeat sees
            return
        self._missing = {name: self._missing.get(name, 0) + 1 for name in unfinished}
        for name, times in self._missing.items():
            request, number = state.scheduler.requests.get(name), state.numbers.get(name)
            if times == CHECKS and request is not None and number is not None and not request.is_finished():
                self._log.not_queued(number, status_of(request))
