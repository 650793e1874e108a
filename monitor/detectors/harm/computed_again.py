"""harm.computed-again: a running request is sent back, and computes what it had computed."""

from __future__ import annotations

from collections.abc import Iterable

from ...base.text import duration
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import Harmed, computed_again
from ..judgement import seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue
from .request_harm import TokenHarm, since_when, whom


class ComputedAgain(TokenHarm):
    """Requests that compute the same tokens again, for no reason that is known.

    Sees: a running request whose computed tokens fall without a preemption, and do not come further than before.
    Confirmed when: for as long as a request may go without a token. The verdict is about the harm, not its cause.
    Likely when: events were lost.
    Not when: it was preempted (thrash.preemption); draft tokens were rejected.
    """

    code = "harm.computed-again"
    severity = "error"
    title = "A running request is computed again and comes no further"

    def harmed(self, ledger: EngineLedger) -> Iterable[Harmed]:
        """Return those that were sent back."""
        return computed_again(ledger)

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return how far the first had come, and who waits meanwhile."""
        record, waiting = first.record, len(ledger.living().waiting)
        behind = f" {waiting:,} wait meanwhile." if waiting else ""
        return {
            "explanation": (
                f"{whom(late)} {'is' if len(late.records) == 1 else 'are'} computed again without a preemption and"
                f" came no further, {since_when(ledger, late)}: {record.id} had {record.reached_tokens:,} of its tokens"
                f" computed {duration(ledger.age_s(record.reached_ns))} ago, was sent back, and has"
                f" {record.computed_tokens:,} now.{behind}"
            ),
            "evidence": (
                seen("furthest_tokens", record.reached_tokens, "tokens", ledger.at(first.at)),
                seen("computed_tokens", record.computed_tokens, "tokens", ledger.at(ledger.state.places.progressed)),
                seen("preemptions", record.preemptions, "times", ledger.at(record.preempted_at, record.since_at)),
                seen("requests_waiting", waiting, "requests", ledger.at(ledger.state.places.moved)),
            ),
        }
