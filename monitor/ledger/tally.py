"""What is counted of the events beyond the books, for whoever draws it over time."""

from __future__ import annotations

from collections.abc import Iterable

from monitor.events.records import RequestState
from monitor.events.state import State
from monitor.ledger.latency import SERVED, Latencies
from monitor.ledger.recompute import Recompute
from monitor.ledger.residency import Residency


class Tally:
    """The counts of one life of an engine, since we have listened."""

    def __init__(self) -> None:
        self.residency = Residency()
        self.recompute = Recompute()
        self.served = Latencies()
        self.failed = Latencies()

    def follow(self, state: State) -> None:
        """Be told of stays as `state` folds on; anew where events were missed. While it is damaged, nothing is told."""
        if state.stays is None and not state.damaged:
            self.residency.take(state)
            state.stays = self.residency
        self.residency.in_step = state.stays is not None

    def finished(self, requests: Iterable[RequestState]) -> None:
        """These have just ended."""
        for request in requests:
            (self.served if request.status in SERVED else self.failed).add(request)
