"""harm.no-progress: a request runs, gets no token, and no other finding explains it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ...base.text import duration
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import Harmed, without_progress
from ...ledger.records import StepInFlight
from ..detector import Settings
from ..engine_pace import (
    EARLY_S,
    EARLY_STEPS,
    NO_TOKEN_S,
    TIMES_EXPECTED,
    taken_up_until_ns,
    without_token_s,
)
from ..judgement import Judgement, seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue
from .request_harm import TokenHarm, since_when, whom


class NoProgress(TokenHarm):
    """Running requests that get no token, for no reason that is known.

    Sees: a request that runs and gets no token, from steps that are launched or from one that does not end.
    Confirmed when: for five seconds and three times the slowest step. The verdict is about the harm, not its cause.
    Likely when: events were lost.
    Not when: another finding names the request; the step in flight computes far more than any before, so that nothing
    shows how long it takes (stuck.engine-stalled).
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

    def detect_unclaimed(
        self, ledger: EngineLedger, settings: Settings, causes: Sequence[Judgement]
    ) -> Iterator[Judgement]:
        """Yield them. While a step is overdue only a cause that fires claims them: one that is pending may stay so for
        ten times as long as a client may go without a token.
        """
        if _is_step_overdue(ledger, settings):
            causes = [cause for cause in causes if not cause.pending]
        return super().detect_unclaimed(ledger, settings, causes)

    def until_ns(self, ledger: EngineLedger, settings: Settings) -> int:
        """Return when the engine was last heard while a step is overdue: it is not going to bring their tokens."""
        overdue = _is_step_overdue(ledger, settings)
        return taken_up_until_ns(ledger) if overdue else super().until_ns(ledger, settings)

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return how far the first has come."""
        record = first.record
        return {
            "explanation": (
                f"{whom(late)} {'runs' if len(late.records) == 1 else 'run'} and got no token,"
                f" {since_when(ledger, late)}.{_step_text(ledger)} {record.id} stands at"
                f" {record.computed_tokens:,} tokens computed and {record.output_tokens:,} generated."
            ),
            "evidence": (
                seen("computed_tokens", record.computed_tokens, "tokens", ledger.at(ledger.state.places.progressed)),
                seen("output_tokens", record.output_tokens, "tokens", ledger.at(ledger.state.places.progressed)),
                seen("last_step", ledger.state.last_step, "step", ledger.at(ledger.state.places.completed)),
            ),
        }


def _first_in_flight(ledger: EngineLedger) -> StepInFlight | None:
    return min(ledger.state.in_flight.values(), key=lambda step: step.since_ns, default=None)


def _is_step_overdue(ledger: EngineLedger, settings: Settings) -> bool:
    """Return whether the step in flight has lasted for longer than a request may go without a token, though others have
    ended that computed as much, to a factor of two.
    """
    step, model = _first_in_flight(ledger), ledger.step_model()
    work = ledger.step_times.work_of(step.step) if step is not None else None
    if step is None or work is None or model is None or not model.has_seen_like(work):
        return False
    return ledger.age_s(step.since_ns) > without_token_s(ledger, settings)


def _step_text(ledger: EngineLedger) -> str:
    """Return a sentence about the step that has been in flight for the longest."""
    first = _first_in_flight(ledger)
    if first is None:
        return ""
    return f" Step {first.step:,} has been in flight for {duration(ledger.age_s(first.since_ns))}."
