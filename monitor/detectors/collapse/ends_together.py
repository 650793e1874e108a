"""The natural ends of requests from which bursts are grouped."""

from __future__ import annotations

from collections.abc import Reversible
from operator import attrgetter
from typing import Final

from kvscope.monitor.events.kinds import Status
from kvscope.monitor.state.records import RequestState

# As plain numbers: comparing with an IntEnum's member costs several times as much, and all that ended are checked.
NATURAL_ENDS: Final = frozenset((int(Status.FINISHED_STOPPED), int(Status.FINISHED_LENGTH_CAPPED)))
FINISHED_NS: Final = attrgetter("finished_ns")


def ended_since_pause(ended: Reversible[RequestState], since_ns: int, within_ns: float) -> list[RequestState]:
    """Return the natural ends from which each burst since `since_ns` is the one that it is from the first end on: those
    after a pause longer than a burst, or all. `ended` has the latest last. This runs at every judgement, so it reads no
    further back than the pause.
    """
    recent: list[RequestState] = []
    for record in reversed(ended):
        if record.status not in NATURAL_ENDS:
            continue
        if record.finished_ns <= since_ns and (not recent or recent[-1].finished_ns - record.finished_ns > within_ns):
            break
        recent.append(record)
    recent.reverse()  # those of one moment stay in their order
    recent.sort(key=FINISHED_NS)
    return recent
