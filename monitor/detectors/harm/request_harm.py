"""The base class of harm.* codes about requests: who is harmed for how long, and which of it no cause claims.

A finding that is still pending claims its requests for a while too, so that the cause is told first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ...base.text import counted, duration, listed
from ...ledger.engine_ledger import EngineLedger
from ...ledger.engine_state import EVENT_BITS
from ...ledger.harms import Harmed, known_until_ns
from ...ledger.records import RequestState
from ..detector import Causes, Settings
from ..engine_pace import without_token_s
from ..judgement import ENGINE_PAUSED, NO_WORK, Judgement, hits_its_blocks, seen
from ..runbook_files import FindingFields
from ..stuck.waiting_requests import Overdue, overdue_judgement, overdue_requests, requests_text, since_text
from .held_blocks import HeldBlocks
from .unclaimed_harm import HarmDetector, claimed_requests

PENDING_TIMES: Final = 3
"""A pending finding claims a harm until it has lasted so many times as long as it may: a cause that is seen by then has
fired.
"""


class RequestHarm(HarmDetector[Judgement]):
    """Finds harmed requests. A subclass has `harmed`, `grace_of` and `told`."""

    alternatives = (NO_WORK, ENGINE_PAUSED)
    causes = Causes[Judgement]().of(HeldBlocks, hits_its_blocks)

    def harmed(self, ledger: EngineLedger) -> Iterable[Harmed]:
        """Return who is harmed now, for however short a time."""
        raise NotImplementedError

    def until_ns(self, ledger: EngineLedger, settings: Settings) -> int:
        """Return until when the harm is known to have lasted."""
        return ledger.looked_ns

    def grace_of(self, ledger: EngineLedger, settings: Settings) -> Callable[[Harmed], float]:
        """Return a function that gives how many seconds a harm may last."""
        raise NotImplementedError

    def told(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        """Return its own evidence and explanation. A `case` is a cause that is known after all."""
        raise NotImplementedError

    def detect_unclaimed(
        self, ledger: EngineLedger, settings: Settings, causes: Sequence[Judgement]
    ) -> Iterator[Judgement]:
        """Yield the requests that suffer for no reason that is known."""
        if ledger.state.stopped_ns:
            return
        found = {each.record.number: each for each in self.harmed(ledger) if _is_known(ledger, each.record)}
        if not found:
            return
        claimed = claimed_requests(ledger, [cause for cause in causes if not cause.pending])
        for_now = claimed_requests(ledger, causes)
        grace_of, until_ns = self.grace_of(ledger, settings), self.until_ns(ledger, settings)
        unclaimed = [
            each.record
            for number, each in found.items()
            if each.record.id
            not in (for_now if until_ns - each.since_ns < PENDING_TIMES * grace_of(each) * 1e9 else claimed)
        ]
        late = overdue_requests(
            ledger,
            unclaimed,
            lambda record: found[record.number].since_ns,
            until_ns,
            lambda record: grace_of(found[record.number]),
        )
        if late is not None:
            first = found[late.records[0].number]
            yield overdue_judgement(self, ledger, late, began_at=first.at, **self._fields(ledger, late, first))

    def _fields(self, ledger: EngineLedger, late: Overdue, first: Harmed) -> FindingFields:
        state, at = ledger.state, ledger.at
        own = self.told(ledger, late, first)
        blocks = sorted({block for record in late.records for block in record.blocks})
        own["blocks"] = tuple(blocks)
        own["evidence"] = (
            seen("requests_harmed", len(late.records), "requests", at(first.at)),
            seen("longest_harm_s", round(late.age_s, 1), "s", at(first.at)),
            *own.get("evidence", ()),
            seen("blocks_free", state.free, "blocks", at(state.places.pool)),
            seen("blocks_held", len(blocks), "blocks", at(state.places.pool)),
        )
        unknown = "" if own.get("case") else " No other finding explains it, so the cause is not known."
        own["explanation"] += (
            f" The engine is not paused, its scheduler has gone over the queue since, and"
            f" {counted(state.free, 'block')} of {state.usable:,} {'is' if state.free == 1 else 'are'} free.{unknown}"
        )
        return own


class TokenHarm(RequestHarm):
    """Finds running requests that come no further: for longer than the engine's own pace explains."""

    def until_ns(self, ledger: EngineLedger, settings: Settings) -> int:
        """Return when the step in flight began, if there is one: it may have their token."""
        return known_until_ns(ledger)

    def grace_of(self, ledger: EngineLedger, settings: Settings) -> Callable[[Harmed], float]:
        """Return the same for all: by the engine's pace."""
        grace_s = without_token_s(ledger, settings)
        return lambda _harmed: grace_s


def _is_known(ledger: EngineLedger, record: RequestState) -> bool:
    """Return whether an event has named the request since events were last lost. An audit of the blocks does not show
    that a request without any has ended, or runs.
    """
    if not ledger.losses:
        return True
    last = ledger.losses[-1]
    if ledger.wall(max(record.since_ns, record.arrived_ns, record.progressed_ns)) > last.at_ns:
        return True
    places = (record.passed_over_at, record.refused_at, record.stalled_at)
    return max(places) >> EVENT_BITS > last.after


def whom(late: Overdue) -> str:
    """Return `Request r-7` or `3 requests (r-7, r-8, r-9)`, for the beginning of a sentence."""
    return requests_text(late) if len(late.records) == 1 else f"{requests_text(late)} ({listed(late.ids)})"


def since_when(ledger: EngineLedger, late: Overdue) -> str:
    """Return `since 14:02:11 (5.2 s)`."""
    return f"{since_text(ledger, late)} ({duration(late.age_s)})"
