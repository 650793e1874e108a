"""harm.no-progress: a request runs, gets no token, and no other finding explains it."""

from __future__ import annotations

from collections.abc import Iterable

from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import Harmed, without_progress
from ..judgement import seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue
from .request_harm import (
    EARLY_S,
    EARLY_STEPS,
    NO_TOKEN_S,
    TIMES_EXPECTED,
    TokenHarm,
    since_when,
    whom,
)


class NoProgress(TokenHarm):
    """Running requests that get no token, for no reason that is known.

    Sees: steps that are launched, and a request that runs and gets a token from none of them.
    Confirmed when: for five seconds and three times the slowest step. The verdict is about the harm, not its cause.
    Likely when: events were lost.
    Not when: another finding names the request, or the step in flight has not ended (stuck.engine-stalled).
    """

    code = "harm.no-progress"
    severity = "error"
    title = "A running request gets no token, for no known cause"

    no_token_s = NO_TOKEN_S
    times_expected = TIMES_EXPECTED
    early_steps = EARLY_STEPS
    early_s = EARLY_S

    def harmed(self, ledger: EngineLedger) -> Iterable[Harmed]:
        """Return those that run."""
        return without_progress(ledger)

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return how far the first has come."""
        record = first.record
        return {
            "explanation": (
                f"{whom(late)} {'runs' if len(late.records) == 1 else 'run'} and got no token,"
                f" {since_when(ledger, late)}, while the engine launched steps. {record.id} stands at"
                f" {record.computed_tokens:,} tokens computed and {record.output_tokens:,} generated."
            ),
            "evidence": (
                seen("computed_tokens", record.computed_tokens, "tokens", ledger.at(ledger.state.places.progressed)),
                seen("output_tokens", record.output_tokens, "tokens", ledger.at(ledger.state.places.progressed)),
                seen("last_step", ledger.state.last_step, "step", ledger.at(ledger.state.places.completed)),
            ),
        }
