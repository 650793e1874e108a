"""Finds requests by a part of their id, over all engines: in the ledgers, then in the history, the latest first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Final

from kvscope.monitor.events.kinds import Status, name_of
from kvscope.monitor.history.history import History
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.schema import FoundRequest, RequestSearch
from kvscope.monitor.text import timestamp

MAX_SEARCH_S: Final = 5.0
"""Longer than a reader of the page waits. The answer reports how far back it went."""
_ONE_MS_NS: Final = 1_000_000

Found = dict[tuple[str, int, int], FoundRequest]
"""By engine, epoch and number."""


def in_ledger(ledger: EngineLedger, part: str, from_ns: int, to_ns: int) -> Iterator[FoundRequest]:
    """Yield the requests of a window that live, hold blocks or ended recently. part: of the id, in lower case."""
    living = ledger.state.requests
    for record in (*living.values(), *reversed(ledger.ended)):
        seen_ns = ledger.wall(record.received_ns or record.arrived_ns)
        is_there = record.number in living or ledger.wall(record.since_ns) >= from_ns
        if part in record.id.lower() and seen_ns <= to_ns and is_there:
            yield FoundRequest(
                ledger.engine,
                record.id,
                record.number,
                ledger.epoch,
                name_of(Status, record.status),
                record.number not in living,
                timestamp(seen_ns),
            )


class HistorySearch:
    """A search in the history: `found` grows with each segment, the latest first, until `limit` or MAX_SEARCH_S."""

    def __init__(self, history: History, part: str, from_ns: int, to_ns: int, found: Found, limit: int) -> None:
        self.found = found
        self.searched_ns = to_ns
        self.is_complete = True
        self._history = history
        self._part = part
        self._from_ns = from_ns
        self._to_ns = to_ns
        self._limit = limit
        self._until_s = time.monotonic() + MAX_SEARCH_S

    def search(self, engine: str) -> None:
        """Search the segments of an engine."""
        for reader in self._history.readers(engine, self._from_ns, self._to_ns):
            if len(self.found) >= self._limit or time.monotonic() > self._until_s:
                self.is_complete = False
                return
            with contextlib.suppress(FileNotFoundError):  # retention has dropped it since
                for wall_ns, epoch, texts in reader.texts():
                    self._enter(engine, wall_ns, epoch, texts)
                    self.searched_ns = min(self.searched_ns, wall_ns)

    def _enter(self, engine: str, wall_ns: int, epoch: int, texts: dict[int, str]) -> None:
        for number, text in texts.items():
            if number < 0 or self._part not in text.lower() or not self._from_ns <= wall_ns <= self._to_ns:
                continue
            place = (engine, epoch, number)
            before = self.found.get(place)
            at = timestamp(wall_ns + _ONE_MS_NS) or ""
            if before is None or (before.at and at < before.at):
                self.found[place] = FoundRequest(engine, text, number, epoch, "", True, timestamp(wall_ns), at)


def ordered(found: Found, limit: int, searched_ns: int, is_complete: bool) -> RequestSearch:
    """Return the answer: those that live first, then the latest."""
    requests = sorted(found.values(), key=lambda one: (not one.ended, one.first_seen or ""), reverse=True)
    return RequestSearch(requests[:limit], timestamp(searched_ns), is_complete and len(requests) <= limit)
