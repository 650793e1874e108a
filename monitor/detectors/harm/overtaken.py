"""harm.overtaken: a request waits while others that arrived later are admitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ...base.text import counted
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import Harmed, overtaken
from ..detector import Settings, Threshold
from ..engine_pace import MIN_STEPS, pace_s
from ..judgement import seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue
from .request_harm import RequestHarm, since_when, whom


class Overtaken(RequestHarm):
    """Requests that wait while later ones are served.

    Sees: requests that arrived later than a waiting one and are admitted before it.
    Confirmed when: one that is not more urgent, for half a minute, or fifty. Fifty that are all more urgent, for half a
    minute: the cause is the policy then, and said.
    Likely when: events were lost.
    Not when: fewer overtook it and all are more urgent; it lacks something of its own (an adapter's slot, an encoder's
    output, KV, a grammar); another finding names it.
    """

    code = "harm.overtaken"
    severity = "warning"
    title = "A request waits while requests that arrived later are served"

    grace_s = Threshold(30, "s", "the longest that a client who sees others served takes for a busy moment")
    overtakers = Threshold(50, "requests", "no order but one that forgets it lets fifty pass first")

    def harmed(self, ledger: EngineLedger) -> Iterable[Harmed]:
        """Return those that others have overtaken."""
        return overtaken(ledger)

    def grace_of(self, ledger: EngineLedger, settings: Settings) -> Callable[[Harmed], float]:
        """Return `grace_s` at the engine's pace, three steps once so many as urgent have overtaken it, and no end while
        fewer have that are all more urgent.
        """
        pace = pace_s(ledger, settings, MIN_STEPS)
        most, grace_s = settings(self.overtakers), max(settings(self.grace_s), pace)

        def grace(harmed: Harmed) -> float:
            if not harmed.alike and harmed.overtakers < most:
                return math.inf
            return pace if harmed.alike >= most else grace_s

        return grace

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return by how many, and whether they were more urgent."""
        record, at = first.record, ledger.at
        urgent = first.overtakers - first.alike
        policy = (
            f" All of them are more urgent than its priority, {record.priority}: the policy starves it."
            if not first.alike
            else f" {first.alike:,} of them are not more urgent, so no priority explains it."
        )
        return {
            "explanation": (
                f"{whom(late)} {'waits' if len(late.records) == 1 else 'wait'} while requests that arrived later are"
                f" admitted, {since_when(ledger, late)}: {counted(first.overtakers, 'request')} overtook"
                f" {record.id}.{policy}"
            ),
            "evidence": (
                seen("overtakers", first.overtakers, "requests, at the least", at(first.at)),
                seen("more_urgent_overtakers", urgent, "requests", at(first.at)),
                seen("priority", record.priority, "", at(first.at)),
            ),
            "case": "" if first.alike else "All of them are more urgent",
        }
