"""The life of a request as phases: from one state and reason to the next, with what each cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from kvscope.monitor.events.kinds import FIRST_FINISHED, Cause, Kind, Status, name_of
from kvscope.monitor.events.wire import Run
from kvscope.monitor.ledger.engine_ledger import Position
from kvscope.monitor.state.records import RequestState

_BLOCK_CHANGES: Final = {
    int(Kind.ALLOCATED): 1,
    int(Kind.REUSED): 1,
    int(Kind.RELEASED): -1,
    int(Kind.DETACHED): -1,
}
"""By kind, whether the event's blocks enter (1) or leave (-1) the request's table."""


class Phase(msgspec.Struct):
    """One state of a request for one reason. Wall times in ns. Blocks and tokens are those at its end.

    computed: tokens computed in it, of which `recomputed` had been computed before and were lost.
    """

    status: int
    cause: int
    since_ns: int
    until_ns: int = 0
    blocks: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    computed: int = 0
    recomputed: int = 0

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.until_ns - self.since_ns) / 1e9


def phases(about: Iterable[tuple[Position, int, Run]], number: int, now_ns: int) -> list[Phase]:
    """Return the phases of request `number` by the events about it. The last one is not over, or lasts until
    `now_ns`.
    """
    folded = RequestPhases(number)
    for _, at_ns, event in about:
        folded.apply(event, at_ns)
    if folded.phases:
        folded.phases[-1].until_ns = max(now_ns, folded.phases[-1].since_ns)
    return folded.phases


class RequestPhases:
    """A fold of the events of one request, into its phases so far."""

    def __init__(self, number: int) -> None:
        self.phases: list[Phase] = []
        self._number = number
        self._at_ns = 0
        self._blocks = 0
        self._blocks_before = 0
        """At the end of the moment before this one: blocks are allocated just before a request is admitted."""
        self._computed = 0
        self._most_computed = 0

    @classmethod
    def joined(cls, record: RequestState, since_ns: int) -> RequestPhases:
        """Return the phases of a request that existed before its first event: its current state since `since_ns`
        (wall).
        """
        folded = cls(record.number)
        folded._blocks = folded._blocks_before = len(record.blocks)
        folded._computed = folded._most_computed = record.computed_tokens
        folded._enter(record.status, record.cause, since_ns)
        folded.phases[-1].blocks, folded.phases[-1].output_tokens = len(record.blocks), record.output_tokens
        return folded

    def apply(self, event: Run, at_ns: int) -> None:
        """Fold in an event about it, of that wall time."""
        a, n = event.args, len(event.ids)
        if at_ns != self._at_ns:
            self._at_ns, self._blocks_before = at_ns, self._blocks
        if event.kind in _BLOCK_CHANGES:
            self._blocks = max(0, self._blocks + _BLOCK_CHANGES[event.kind] * n)
        elif event.kind == Kind.PROGRESSED:
            place = event.ids.index(self._number)
            if len(a) >= 2 * n:
                self._progressed(a[place], a[n + place], at_ns)
        else:
            self._transition(event.kind, a, at_ns)
        if self.phases:
            self.phases[-1].blocks = self._blocks

    def _transition(self, kind: int, a: list[int], at_ns: int) -> None:
        """Enter the status that an event of this kind leads to, if it leads to one."""
        match kind:
            case Kind.RECEIVED:
                self._enter(Status.RECEIVED, Cause.NONE, at_ns)
            case Kind.ARRIVED | Kind.READY:
                self._enter(Status.WAITING, Cause.NEW, at_ns)
            case Kind.QUEUED if a[0] != Cause.NEW:
                self._enter(Status.PREEMPTED if a[0] == Cause.PREEMPTED else Status.WAITING, a[0], at_ns)
            case Kind.NOT_SCHEDULED if self.phases:
                self._enter(self.phases[-1].status, a[0], at_ns)
            case Kind.ADMITTED:
                self._computed = a[0]
                if self.phases:
                    self.phases[-1].blocks = self._blocks_before
                self._enter(Status.RUNNING, Cause.NONE, at_ns)
            case Kind.PREEMPTED:
                self._computed = 0
                self._enter(Status.PREEMPTED, Cause.PREEMPTED, at_ns)
            case Kind.WAITING_ON | Kind.FINISHED:
                self._enter(a[0], Cause.NONE, at_ns)

    def _enter(self, status: int, cause: int, at_ns: int) -> None:
        last = self.phases[-1] if self.phases else None
        if last is not None:
            if (last.status, last.cause) == (status, cause) or last.status >= FIRST_FINISHED:
                return
            if last.status == status and last.since_ns == at_ns:  # the reason that it has from the start
                last.cause = cause
                return
            last.until_ns = at_ns
        self.phases.append(Phase(status, cause, at_ns, computed_tokens=self._computed))
        if last is not None:
            self.phases[-1].output_tokens = last.output_tokens

    def _progressed(self, computed: int, outputs: int, at_ns: int) -> None:
        if not self.phases:  # what was before is no longer kept
            self._computed = self._most_computed = computed
            self._enter(Status.RUNNING, Cause.NONE, at_ns)
        if self.phases[-1].status == Status.RUNNING:
            self._enter(Status.RUNNING, Cause.NONE, at_ns)
        phase = self.phases[-1]
        phase.computed += max(0, computed - self._computed)
        phase.recomputed += max(0, min(computed, self._most_computed) - self._computed)
        self._computed = phase.computed_tokens = computed
        self._most_computed = max(self._most_computed, computed)
        phase.output_tokens = outputs


def phase_names(phase: Phase) -> tuple[str, str]:
    """Return its state and its reason, by name. The reason is empty where there is none."""
    return name_of(Status, phase.status), "" if phase.cause == Cause.NONE else name_of(Cause, phase.cause)
