"""How long requests waited, for their turn and for their tokens: folded when each ends."""

from __future__ import annotations

from typing import Final

from kvscope.monitor.events.kinds import Status
from kvscope.monitor.ledger.histogram import Histogram
from kvscope.monitor.state.records import RequestState

LATENCY_BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
SERVED: Final = frozenset((Status.FINISHED_STOPPED, Status.FINISHED_LENGTH_CAPPED, Status.FINISHED_REPETITION))
"""How a request ends that got what it asked for."""


class Latencies:
    """Latencies of the requests that ended in one way, since reading began.

    queue         from arrival until first admitted, or until the end without an admission
    first_token   from arrival until the first token of output
    per_token     between two tokens of output, on average over the request
    """

    def __init__(self) -> None:
        self.queue = Histogram(LATENCY_BOUNDS_S)
        self.first_token = Histogram(LATENCY_BOUNDS_S)
        self.per_token = Histogram(TOKEN_BOUNDS_S)

    def add(self, request: RequestState) -> None:
        """One has ended."""
        for name, ns in times_of(request).items():
            histogram: Histogram = getattr(self, name)
            histogram.observe([ns])


def times_of(request: RequestState) -> dict[str, int]:
    """How long one that has ended took, in ns, by the names that Latencies has. Phases before reading began are left
    out.
    """
    times = {}
    arrived, first = request.arrived_ns, request.first_token_ns
    if arrived:
        times["queue"] = (request.admitted_ns or request.finished_ns) - arrived
        if first:
            times["first_token"] = first - arrived
    if first and request.output_tokens > 1:
        times["per_token"] = (request.finished_ns - first) // (request.output_tokens - 1)
    return times
