"""Compares what the monitor answers about the past with the journals that the engines keep of themselves."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Final, NamedTuple

import httpx2

from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, decode
from kvscope.monitor.ledger.event_history import BLOCK_KINDS
from kvscope.monitor.questions.schema import BLOCK_STATES

from ..second_fold import SecondFold
from .arena import ENGINES, Arena
from .engines_process import chaos_engine_name

MAX_COMPARED: Final = 400
"""Batches that one check compares event by event: the newest."""
SETTLED_BATCHES: Final = 5
"""The newest batches of a journal may not have arrived yet."""
EVENT_BYTES: Final = 20


class JournalPlace(NamedTuple):
    """A batch of an engine."""

    epoch: int
    sequence: int


class HistoryCheck:
    """Remembers from where on each engine's history must be complete: at first, from the newest batch on."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._from: dict[int, JournalPlace] = {}
        self.forgive(ENGINES)

    def forgive(self, engines: int) -> None:
        """Require nothing of what was received until now."""
        for number in range(engines):
            batches = self.batches(number)
            if batches:
                self._from[number] = JournalPlace(batches[-1].epoch, batches[-1].sequence)

    def batches(self, number: int) -> list[Batch]:
        """Return what the journal of an engine holds of its newest epoch."""
        directory = self._arena.folder / "engines" / f"journal-{number}"
        frames = [decode(payload) for payload in journal.read(directory)] if _has_segments(directory) else []
        batches = [frame for frame in frames if isinstance(frame, Batch) and frame.sequence >= 0]
        newest = max((batch.epoch for batch in batches), default=0)
        return [batch for batch in batches if batch.epoch == newest]

    def missing(self, number: int) -> list[str]:
        """Return what the monitor lacks of an engine's history, or answers otherwise than a second fold."""
        batches = self.batches(number)[:-SETTLED_BATCHES]
        if not batches:
            return []
        begin = self._from.get(number, JournalPlace(0, -1))
        wanted = [batch for batch in batches if (batch.epoch, batch.sequence) > begin][-MAX_COMPARED:]
        if not wanted:
            return []
        return self.missing_events(number, wanted) + self._different_blocks(chaos_engine_name(number), batches)

    def missing_events(self, number: int, wanted: list[Batch]) -> list[str]:
        """Return which events about blocks the monitor lacks of these batches of an engine."""
        name = chaos_engine_name(number)
        epoch = wanted[0].epoch
        first, last = wanted[0].sequence, wanted[-1].sequence
        held = {
            f"{epoch}/{batch.sequence}/{index}"
            for batch in wanted
            for index, event in enumerate(batch.events())
            if event.kind in BLOCK_KINDS
        }
        since = f"{epoch}/{max(first - 1, 0)}/0"
        until = f"{epoch}/{last}/{max(len(wanted[-1].runs) // EVENT_BYTES - 1, 0)}"
        try:
            found = self._arena.ask("/api/events", engine=name, since=since, until=until, limit="10000")
        except httpx2.HTTPStatusError as error:
            return [f"{name}: events {first}–{last}: {error.response.text[:200]}"]
        answered = {each["position"] for each in found}
        lacking = sorted({int(position.split("/")[1]) for position in held - answered})
        if not lacking:
            return []
        return [f"{name}: {len(held - answered)} of {len(held)} events, batches {lacking[0]}–{lacking[-1]}"]

    def _different_blocks(self, name: str, batches: list[Batch]) -> list[str]:
        fold = SecondFold()
        for batch in batches:
            fold.add(batch)
        if fold.lossy or batches[0].sequence:  # a fold needs the first batch
            return []
        last = batches[-1]
        at = f"{last.epoch}/{last.sequence}/{max(len(last.runs) // EVENT_BYTES - 1, 0)}"
        try:
            states = _block_states(self._arena, name, at)
        except httpx2.HTTPStatusError as error:
            return [f"{name}: blocks at {at}: {error.response.text[:200]}"]
        expected = bytes(_is_used(fold, block) for block in range(fold.total))
        differ = sum(a != b for a, b in zip(states, expected, strict=True))
        return [f"{name}: {differ} blocks at {at} differ from the journal's"] if differ else []


def _is_used(fold: SecondFold, block: int) -> bool:
    return fold.references[block] > 0


def _block_states(arena: Arena, name: str, at: str) -> bytes:
    """Whether each block is used."""
    states = base64.b64decode(arena.ask("/api/block_map", engine=name, at=at)["states"])
    unused = {BLOCK_STATES.index(state) for state in ("free", "cached-idle", "reserved")}
    return bytes(state not in unused for state in states)


def _has_segments(directory: Path) -> bool:
    return directory.is_dir() and bool(journal.journal_segments(directory))
