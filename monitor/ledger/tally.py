"""What is counted of the events beyond the books, for whoever draws it over time: one walk over each batch."""

from __future__ import annotations

from collections.abc import Iterable

from monitor.events.kinds import Kind
from monitor.events.records import RequestState
from monitor.events.state import State
from monitor.events.wire import fives
from monitor.ledger.latency import SERVED, Latencies
from monitor.ledger.recompute import Recompute
from monitor.ledger.residency import KINDS, Residency

_PREEMPTED, _ADMITTED, _FINISHED = int(Kind.PREEMPTED), int(Kind.ADMITTED), int(Kind.FINISHED)


class Tally:
    """The counts of one life of an engine, since we have listened."""

    def __init__(self) -> None:
        self.residency = Residency()
        self.recompute = Recompute()
        self.served = Latencies()
        self.failed = Latencies()

    def fold(self, state: State, runs: list[int], args: list[int], ids: list[int], now_ns: int) -> None:
        """One batch, which `state` has folded in already. While the books are damaged, nothing is counted."""
        residency, recompute = self.residency, self.recompute
        if state.damaged or not residency.in_step:
            recompute.forget()
            residency.in_step = False
            if not state.damaged:
                residency.take(state)
            return
        a = i = 0
        for kind, _, number, n_args, n_ids in fives(runs):
            if n_ids and kind in KINDS:
                residency.apply(kind, ids[i : i + n_ids], now_ns)
            elif kind == _PREEMPTED:
                recompute.preempted(number, args[a + 3])
            elif kind == _ADMITTED:
                recompute.admitted(number, args[a])
            elif kind == _FINISHED:
                recompute.ended(number)
            a += n_args
            i += n_ids

    def finished(self, requests: Iterable[RequestState]) -> None:
        """These have just ended."""
        for request in requests:
            (self.served if request.status in SERVED else self.failed).add(request)
