"""The requests that have not ended, sorted by where they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from kvscope.monitor.events.kinds import FIRST_FINISHED, Status
from kvscope.monitor.state.records import RequestState

_IS_RUNNING: Final = int(Status.RUNNING)
_IS_RECEIVED: Final = int(Status.RECEIVED)
_FIRST_ENDED: Final = int(FIRST_FINISHED)


class Living(NamedTuple):
    """The requests that have not ended; each list in the order of arrival."""

    received: list[RequestState]
    waiting: list[RequestState]
    running: list[RequestState]


def sort_living(requests: Iterable[RequestState]) -> Living:
    """Sort the requests that have not ended."""
    found = Living([], [], [])
    for record in requests:
        status = record.status
        if status == _IS_RUNNING:
            found.running.append(record)
        elif _IS_RECEIVED < status < _FIRST_ENDED:
            found.waiting.append(record)
        elif status == _IS_RECEIVED:
            found.received.append(record)
    return found
