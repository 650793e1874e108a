"""harm.unserved: requests wait though the engine could run them, and no other finding explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from ...base.text import counted, in_words, percent
from ...contract.kinds import Cause
from ...ledger.engine_ledger import EngineLedger
from ...ledger.harms import LEFT_OUT_FOR, Harmed, contradicted_since_ns, has_room, unserved
from ..detector import Causes, Settings, Threshold
from ..engine_pace import without_token_s
from ..judgement import Judgement, hits_its_blocks, hits_its_requests, seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue
from .held_blocks import HeldBlocks
from .overtaken import Overtaken
from .request_harm import RequestHarm, since_when, whom

_OTHER_REASONS: Final = LEFT_OUT_FOR | {int(Cause.KV_BLOCKS)}
"""Reasons that may hold though nothing runs: codes of their own judge them."""


class Unserved(RequestHarm):
    """Requests that the scheduler passes over, for no reason that is known.

    Sees: requests that wait while passes of the scheduler run nothing, or leave places in the batch free and give no
    reason that holds.
    Confirmed when: for five seconds with nothing running and room in the pool, else for half a minute. The verdict is
    about the harm, not its cause.
    Likely when: events were lost.
    Not when: the engine makes no pass (stuck.engine-stalled); they wait for something outside it.
    """

    code = "harm.unserved"
    severity = "critical"
    title = "Requests wait though the engine could run them"

    grace_s = Threshold(
        30,
        "s",
        "with others running, or no room, a step or a transfer may end and admit it: as stuck.head-of-line has it",
    )

    causes = Causes[Judgement]().of(HeldBlocks, hits_its_blocks).of(Overtaken, hits_its_requests)

    def harmed(self, ledger: EngineLedger) -> Iterable[Harmed]:
        """Return those that could be run."""
        return unserved(ledger)

    def grace_of(self, ledger: EngineLedger, settings: Settings) -> Callable[[Harmed], float]:
        """Return the engine's pace where nothing is in the way, and `grace_s` otherwise."""
        at_once_s, head = without_token_s(ledger, settings), ledger.head()
        later_s = max(at_once_s, settings(self.grace_s))
        slow = bool(ledger.living().running) or (head is not None and head.cause in _OTHER_REASONS)
        return lambda harmed: later_s if slow or not has_room(ledger, harmed.record) else at_once_s

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return what runs, and the reason that the engine gives."""
        state, running, count = ledger.state, ledger.living().running, len(late.records)
        head = ledger.head()
        cause = ledger.cause_of_wait(head) if head is not None else Cause.UNKNOWN
        runs = f"{len(running):,} of {ledger.description.max_num_seqs:,} that may run do" if running else "nothing runs"
        why = "The engine gives no reason"
        if head is not None and cause not in (Cause.UNKNOWN, Cause.NEW, Cause.NONE):
            why = f"The engine says why: {in_words(cause.name)}"
            if contradicted_since_ns(ledger, head) is not None:
                why += f". That cannot be: {_state_text(ledger, cause)}"
        return {
            "explanation": (
                f"{whom(late)} {'waits' if count == 1 else 'wait'} and {'is' if count == 1 else 'are'} not admitted,"
                f" {since_when(ledger, late)}, though {runs}. {why}."
            ),
            "evidence": (
                seen("running", len(running), "requests", ledger.at(state.places.moved)),
                seen("max_num_seqs", ledger.description.max_num_seqs, "requests", ledger.at(state.places.started)),
                seen("engine_reason", cause.name, "", ledger.at(head.since_at if head is not None else first.at)),
            ),
        }


def _state_text(ledger: EngineLedger, cause: Cause) -> str:
    """Return what the state has instead of the cause that the engine gives."""
    state, running = ledger.state, len(ledger.living().running)
    return {
        Cause.KV_BLOCKS: f"{percent(state.free / max(state.usable, 1))} of the pool is free",
        Cause.BEHIND_HEAD: "no other request waits",
        Cause.MAX_NUM_SEQS: f"{counted(running, 'request')} of {ledger.description.max_num_seqs:,} run",
        Cause.PAUSED: "the engine's mode is unpaused",
    }.get(cause, "no request runs")
