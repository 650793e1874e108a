"""The engine's work between steps: slices of the audit, and pauses when there is nothing to do."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.contract.event_log import EventLog

from ..blocks.table_audit import TableAuditor
from ..scheduling.scheduler import Scheduler

BLOCKED_PAUSE_S: Final = 0.01
"""Between passes when requests wait and none can be scheduled."""
POLL_PAUSES_S: Final = (0.002, 0.05)
"""Between passes when only a connector has work to do: the first pause, doubled up to the second."""
AUDIT_EVERY_NS: Final = 10_000_000
"""Between slices of the audit while steps are made, however quick those are."""
AUDIT_PAUSE_S: Final = 0.002
"""Between passes when all is done but the audit of it, in cycles of about a thousand slices at most."""
AUDITS_AT_REST: Final = 3
"""One may have begun before the last change, one reports it, and one more is for a reader who came during that."""
IDLE_AUDIT_EVERY_NS: Final = 1_000_000_000
"""The interval between slices once the changes are reported and nothing has happened since but the polling of a
connector.
"""


class IdlePolicy:
    """Decides when a slice of the audit is due, and for how long the engine's thread may pause."""

    def __init__(self, scheduler: Scheduler, auditor: TableAuditor, log: EventLog) -> None:
        self._scheduler = scheduler
        self._auditor = auditor
        self._log = log
        self._poll_pause = POLL_PAUSES_S[0]
        self._audited_from = 0
        self._next_slice_ns = 0

    def audit(self, worked: bool) -> None:
        """Audit a slice of the tables, if one is due. `worked`: whether the pass had anything to do."""
        now = self._log.clock.monotonic_ns()
        audited = self._auditor.cycles >= self._audited_from + AUDITS_AT_REST
        if self._log.on and (now >= self._next_slice_ns or not (worked or audited)):
            self._next_slice_ns = now + (IDLE_AUDIT_EVERY_NS if audited and not worked else AUDIT_EVERY_NS)
            self._auditor.slice()

    def note_work(self) -> None:
        """Start over after a pass that had something to do."""
        self._poll_pause, self._audited_from = POLL_PAUSES_S[0], self._auditor.cycles

    def pause(self) -> float | None:
        """Return the seconds to pause before the next pass, or None if nothing can come but a request."""
        if self._scheduler.has_work:
            return BLOCKED_PAUSE_S
        if self._scheduler.deferred:
            pause = self._poll_pause
            self._poll_pause = min(2 * pause, POLL_PAUSES_S[1])
            return pause
        if self._log.on and self._auditor.cycles < self._audited_from + AUDITS_AT_REST:
            return AUDIT_PAUSE_S
        return None
