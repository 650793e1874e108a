"""Adds up what a witness of an engine observes, by kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvscope.monitor.incidents.truth.episode_end import ObservedWaste, WasteKind

MOST_NAMED_IN_WASTE: Final = 5_000
"""Requests and blocks that are kept of each kind."""


class WasteLog:
    """The observed waste, by kind. `closed` once the episode is no longer watched: then nothing is added."""

    def __init__(self) -> None:
        self.closed = False
        self._seen: dict[WasteKind, ObservedWaste] = {}
        self._requests: dict[WasteKind, dict[str, None]] = {}
        self._blocks: dict[WasteKind, dict[int, None]] = {}

    def add(
        self, kind: WasteKind, at_s: float, amount: float, requests: Iterable[str] = (), blocks: Iterable[int] = ()
    ) -> None:
        """Add one observation."""
        if not self.closed:
            self.add_even_late(kind, at_s, amount, requests, blocks)

    def add_lost_prefix(self, at_s: float, flushed: int, evicted: int) -> None:
        """Add the tokens of a prefix that is gone: those that one request pushed out, and the others."""
        if flushed:
            self.add("prefix-flushed", at_s, flushed)
        if evicted:
            self.add("prefix-evicted", at_s, evicted)

    def add_even_late(
        self, kind: WasteKind, at_s: float, amount: float, requests: Iterable[str] = (), blocks: Iterable[int] = ()
    ) -> None:
        """Add one observation of the drain: of something that began while the episode was watched."""
        seen = self._seen.get(kind)
        if seen is None:
            seen = self._seen[kind] = ObservedWaste(kind, at_s, at_s)
            self._requests[kind], self._blocks[kind] = {}, {}
        seen.first_s, seen.last_s = min(seen.first_s, at_s), max(seen.last_s, at_s)
        seen.amount += amount
        if len(self._requests[kind]) < MOST_NAMED_IN_WASTE:
            self._requests[kind].update(dict.fromkeys(requests))
        if len(self._blocks[kind]) < MOST_NAMED_IN_WASTE:
            self._blocks[kind].update(dict.fromkeys(blocks))

    def all(self) -> list[ObservedWaste]:
        """Return everything that was observed."""
        for kind, seen in self._seen.items():
            seen.requests, seen.blocks = list(self._requests[kind]), list(self._blocks[kind])
        return list(self._seen.values())
