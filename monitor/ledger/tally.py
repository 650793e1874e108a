"""Statistics beyond the ledger, drawn over time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope.monitor.events.samples import Sample
from kvscope.monitor.ledger.first_token_pace import FirstTokenPace
from kvscope.monitor.ledger.latency import SERVED, Latencies
from kvscope.monitor.ledger.recompute import Recompute
from kvscope.monitor.ledger.residency import Residency
from kvscope.monitor.state.engine_state import EngineState
from kvscope.monitor.state.records import RequestState

MOST_NOTED: Final = 4_096
"""Bound on blocks counted in one go."""


class Tally:
    """The counts of one life of an engine, since we have listened."""

    def __init__(self) -> None:
        self.recompute = Recompute()
        self.served = Latencies()
        self.failed = Latencies()
        self.pace = FirstTokenPace()
        self._residency = Residency()
        self.in_step = False
        """Whether the ages of held and idle blocks are those of the ledger."""

    @property
    def residency(self) -> Residency:
        """All that was noted is counted in it."""
        self._residency.count()
        return self._residency

    def follow(self, state: EngineState) -> None:
        """Follow a batch that was folded into `state`. While it is damaged, nothing is noted. Afterwards the counts
        start over.
        """
        if state.residency_samples is None and not state.damaged:
            state.residency_samples = self._residency.take(state)
        elif self._residency.noted.size > MOST_NOTED:
            self._residency.count()
        self.in_step = state.residency_samples is not None
        self.pace.follow(state.now_ns, state.requests.values())

    def sampled(self, sample: Sample) -> None:
        """Count what a page of metrics has of the requests since the sample before."""
        if sample.restarted:
            self.pace = FirstTokenPace()
        if sample.at_ns is not None:
            self.pace.sampled(sample.at_ns, sample.first_token_s or ())

    def finished(self, requests: Iterable[RequestState]) -> None:
        """Note requests that have just ended."""
        for request in requests:
            (self.served if request.status in SERVED else self.failed).add(request)
            self.pace.finished(request)
