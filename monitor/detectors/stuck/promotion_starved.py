"""stuck.promotion-starved: what a request waited for has come, and the scheduler does not take it up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from ...base.text import duration
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.queue_state import Living, is_outside, was_left_out
from ...ledger.records import RequestState
from ..detector import Causes, Settings, StreamDetector, Threshold
from ..engine_pace import at_pace_s
from ..judgement import ENGINE_PAUSED, NO_WORK, Alternative, Evidence, Judgement, holds_what_it_needs, seen
from .head_of_line import HeadOfLine
from .waiting_requests import (
    Overdue,
    blocks_of_requests,
    overdue_judgement,
    overdue_requests,
    requests_text,
    since_text,
    was_overtaken,
)

CLOSED_PASS: Final = frozenset((Cause.TOKEN_BUDGET, Cause.MAX_NUM_SEQS, Cause.PAUSED, Cause.PREEMPTION_IN_STEP))
"""Limits of a whole pass: with one reached, the scheduler tries no waiting request, however long it has been ready."""
OWN_LACKS: Final = frozenset((Cause.LORA, Cause.CONNECTOR, Cause.STEP_IN_FLIGHT))
"""What one request lacks, so that a pass leaves it in the queue and goes on to those behind it."""


class PromotionStarved(StreamDetector[Judgement]):
    """Requests that are ready and are not scheduled.

    Sees: requests that have what they waited for, and that a scheduler which makes passes puts in no queue and no step.
    Confirmed when: later requests overtook them, the engine reports each request that it puts back, or its passes got
    as far as these.
    Likely when: events were lost.
    Not when: the head of the queue or a limit of the whole pass holds them back; they may lack a slot as others do.
    """

    code = "stuck.promotion-starved"
    severity = "error"
    title = "The scheduler skips requests that are ready"

    grace_s = Threshold(
        10,
        "s",
        "a ready request is considered in the next pass, or in the one after a full step, and not seconds later",
    )
    alternatives = (
        NO_WORK,
        ENGINE_PAUSED,
        Alternative(
            "the head of the queue is rejected before it",
            "later requests were admitted, none is refused, or each pass would put it back in the queue",
        ),
    )
    causes = Causes[Judgement]().of(HeadOfLine, holds_what_it_needs)

    def detect(self, ledger: EngineLedger, settings: Settings) -> Iterator[Judgement]:
        """Yield the requests that are ready and not taken up."""
        living = ledger.living()
        ready = [record for record in living.waiting if record.ready_ns]
        if ready:
            yield from self._from_stream(ledger, settings, living, ready)

    def _from_stream(
        self, ledger: EngineLedger, settings: Settings, living: Living, ready: list[RequestState]
    ) -> Iterator[Judgement]:
        # While the head of the queue is refused, all behind it wait, the ready ones too; unless later ones pass them,
        # or the engine reports each that it puts back in the queue: then these do not stand behind the head.
        head, queues = ledger.head(), ledger.description.queues_ready
        lacks_seen = any(record.cause in OWN_LACKS for record in living.waiting)
        ready = [record for record in ready if not _may_lack_more(record, lacks_seen)]
        skipped = {r.number for r in ready if queues or was_overtaken(r, r.ready_ns, living.running)}
        ready = [r for r in ready if r.number in skipped or _was_due(r, head)]
        grace_s = at_pace_s(ledger, settings, self.grace_s)
        late = overdue_requests(
            ledger,
            ready,
            lambda r: max(r.ready_ns, ledger.state.mode_since_ns, 0 if r.number in skipped else r.since_ns),
            ledger.looked_ns,
            grace_s,
        )
        if late is None:
            return
        count = len(late.records)
        blocks = blocks_of_requests(late.records)
        yield overdue_judgement(
            self,
            ledger,
            late,
            began_at=late.records[0].ready_at,
            blocks=tuple(blocks),
            evidence=_ready_evidence(ledger, late, living.running, blocks),
            explanation=(
                f"{requests_text(late)} {'is' if count == 1 else 'are'} ready, {since_text(ledger, late)}"
                f" ({duration(late.age_s)}): what {'it' if count == 1 else 'they'} waited for has arrived. The"
                f" scheduler keeps running, but has put {'it' if count == 1 else 'them'} neither back in the queue nor"
                " in a step."
            ),
        )


def _may_lack_more(record: RequestState, lacks_seen: bool) -> bool:
    """Return whether it may be back in the queue and lack something else, such as a LoRA slot. An engine reports that
    of the first requests in its queue alone: one that it reports nothing of may lack what others do.
    """
    return lacks_seen and not is_outside(record)


def _was_due(record: RequestState, head: RequestState | None) -> bool:
    """Return whether the scheduler should have reached it, as far as the last pass shows: no limit of the whole pass
    ended that before any waiting request was tried, or before this one was.
    """
    if record.cause in CLOSED_PASS and record.passed_over_at > record.ready_at:
        return False
    return head is None or (head.cause not in CLOSED_PASS and was_left_out(record, head))


def _ready_evidence(
    ledger: EngineLedger, late: Overdue, running: Sequence[RequestState], blocks: Sequence[int]
) -> tuple[Evidence, ...]:
    state, at = ledger.state, ledger.at
    ready_at = at(*(record.ready_at for record in late.records))
    admitted = sum(record.admitted_ns > late.since_ns for record in running)
    return (
        seen("requests_ready", len(late.records), "requests", ready_at),
        seen("ready_for_s", round(late.age_s, 1), "s", at(late.records[0].ready_at)),
        seen("last_step", state.last_step, "step", at(state.places.completed)),
        seen("admitted_since_ready", admitted, "requests", at(state.places.moved)),
        seen("running", len(running), "requests", at(state.places.moved)),
        seen("blocks_held", len(blocks), "blocks", ready_at),
    )
