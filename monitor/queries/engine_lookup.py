"""Which engine a question is about, and which time: names and texts turned into ledgers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from kvscope.monitor.errors import BadQuestion, NotKnown
from kvscope.monitor.events.wire import Batch
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.fleet import Fleet
from kvscope.monitor.queries.past import Past
from kvscope.monitor.queries.stream_time import StreamTime, parse_stream_time

WINDOW_NS: Final = 600_000_000_000
"""The length of a window whose beginning is not given."""

BatchesSince = Callable[[int], Iterator[Batch]]
"""Gives the batches that were packed from a time on (wall ns)."""


def is_without_stream(ledger: EngineLedger) -> bool:
    """Return whether an engine is known from metrics or a log alone."""
    return bool(ledger.samples) and not ledger.has_stream


class EngineLookup:
    """Finds the ledgers of live and past engines. `lock` guards the live ones in `fleet`."""

    def __init__(self, fleet: Fleet, past: Past, lock: threading.RLock) -> None:
        self._fleet = fleet
        self._past = past
        self._lock = lock

    def ledger(self, engine: str) -> EngineLedger:
        """Return the ledger of an engine in its current or last state. Raises NotKnown."""
        with self._lock:
            found = self._fleet.engines.get(engine)
        if found is None:
            found = self._past.last(engine)
        if found is None:
            known = ", ".join(sorted({*self._fleet.engines, *self._past.engines()})) or "none yet"
            raise NotKnown(f"there is no engine {engine!r} here; there are: {known}")
        return found

    def streamed(self, engine: str) -> EngineLedger:
        """Return the same, of an engine with an event stream. Raises NotKnown for one known from metrics only."""
        found = self.ledger(engine)
        if is_without_stream(found):
            raise NotKnown(f"{engine} is known from metrics only: requests and blocks need its event stream")
        return found

    def all(self, seen_since_ns: int = 0) -> Iterator[EngineLedger]:
        """Yield the ledgers of all engines, by name. A past engine counts if it was last seen since then (wall ns)."""
        with self._lock:
            live = dict(self._fleet.engines)
        for engine in sorted({*live, *self._past.engines()}):
            found = live.get(engine)
            if found is None and self._past.last_ns(engine) >= seen_since_ns:
                found = self._past.last(engine)
            if found is not None:
                yield found

    @contextmanager
    def as_of(self, engine: str, at: str, *, history: bool = False) -> Iterator[tuple[EngineLedger, BatchesSince]]:
        """Give the ledger as it was at a time, and what gives the batches until then.

        The ledger of now is the live one, under the lock. With `history`, batches are read back from disk: that is not
        done under the lock.
        """
        live = self.ledger(engine)
        if at or (history and self._past.history is not None):
            ledger = self._past.ledger_at(live, self.time(live, at))
            yield ledger, partial(self._past.batches, live, ledger)
            return
        with self._lock:
            yield live, partial(self._past.batches, live, live)

    def time(self, live: EngineLedger, text: str) -> StreamTime:
        """Return the time that `text` names, or now if it is empty or later. Raises BadTime and NotKnown."""
        named = parse_stream_time(text, live.now_ns) if text else StreamTime(live.now_ns)
        if named.position is not None:
            return named._replace(at_ns=self._past.ledger_at(live, named).now_ns)
        return StreamTime(min(named.at_ns, live.now_ns))

    def time_of_any(self, text: str) -> tuple[StreamTime, str]:
        """Return the same where no engine is named: a position is in the stream of one of them, which is returned."""
        named = parse_stream_time(text, self._now_ns())
        if named.position is None:
            return named, ""
        for live in self.all():
            try:
                return self.time(live, text), live.engine
            except NotKnown:
                continue
        raise NotKnown(f"{named} is in no engine's stored stream")

    def window(self, live: EngineLedger, since: str, until: str) -> tuple[StreamTime, StreamTime]:
        """Return a window: until now and for WINDOW_NS where nothing is given. Raises BadQuestion and NotKnown."""
        last = self.time(live, until)
        first = self.time(live, since) if since else StreamTime(last.at_ns - WINDOW_NS)
        if first.at_ns >= last.at_ns:
            raise BadQuestion(f"the window from {since} until {until or 'now'} is empty")
        return first, last

    def first_ns(self, live: EngineLedger) -> int:
        """Return since when an engine's past is known (wall ns)."""
        first = self._past.span(live).first
        return parse_stream_time(first, live.now_ns).at_ns if first else live.now_ns

    def _now_ns(self) -> int:
        """Return the latest time that any engine has shown."""
        with self._lock:
            live = [ledger.now_ns for ledger in self._fleet.engines.values()]
        return max(live or map(self._past.last_ns, self._past.engines()), default=0)
