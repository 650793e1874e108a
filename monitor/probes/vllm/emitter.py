"""From what the hooks note to the event log: hot paths only append notes, which are written together, in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final

from ...contract.event_log import EventLog
from ...contract.kinds import Evict, Kind
from ...contract.wire import NO_REQUEST
from .probe_state import ProbeState

ALLOCATED, CACHED = int(Kind.ALLOCATED), int(Kind.CACHED)
STEP_LAUNCHED, STEP_COMPLETED = int(Kind.STEP_LAUNCHED), int(Kind.STEP_COMPLETED)
WHOLE_STEP: Final = 0
"""A note for a step launched and completed, with nothing between."""
_BLOCK_NOTES: Final = frozenset((ALLOCATED, CACHED))


class Emitter:
    """Writes to `log`. hash_key: of the prefix hashes, random if empty."""

    def __init__(self, state: ProbeState, log: EventLog, hash_key: bytes) -> None:
        self.log = log
        self.hashes: dict[int, bytes] = {}
        """The contents reported for each cached block: vLLM's own hashes, which the drain thread keys."""
        self.notes: list[tuple[Any, ...]] = []
        """Unwritten notes of every step, in order: a kind, and the data that `write_notes` needs."""
        self.all_numbers: list[int] = []
        """The numbers of all requests, empty if they may have changed."""
        self.timed = False
        """Whether the log has the time of the call under way."""
        self.eventful = True
        """Whether a request has come, waits or was preempted, or anything was written but decode steps."""
        self._state = state
        self._usable = state.usable
        log.keyed = partial(_keyed, partial(blake2b, digest_size=8, key=hash_key or os.urandom(32)))

    @property
    def stamped(self) -> EventLog:
        """The log, up to date and with the time: for events that do not carry their own. Most steps have none."""
        self.write_notes()
        self.stamp_time()
        return self.log

    def stamp_time(self) -> None:
        """Write the time, unless the call under way has."""
        if not self.timed:
            self.timed = self.eventful = True
            self.log.tick()

    def expire_time(self, *_args: Any, **_kwargs: Any) -> None:
        """Let the following events get a time of their own."""
        self.timed = False

    def flush(self) -> None:
        """Hand over what happened until now, for the drain thread to send."""
        self.write_notes()
        step = self._state.step - 1
        self.log.flush(step, step, self._state.counts())

    def count_missed(self) -> None:
        """Something happened that could not be reported: readers trust the audits alone from here."""
        self.log.dropped_batches += 1
        self.log.dropped_events += 1

    def drop_notes(self) -> None:
        """Drop the notes of a call that a broken hook did not see, perhaps the one that would have reported them."""
        self.notes.clear()
        self.count_missed()

    def write_notes(self) -> None:
        """Write what was noted: all at once it costs less than at each step, between vLLM's own work.

        Most notes are of one step or of one block, for which plain loops cost less than comprehensions.
        """
        if not self.notes:
            return
        notes = self.notes[:]
        self.notes.clear()  # in place: the hooks hold this very list
        log, usable = self.log, self._usable
        numbers_now = self.all_numbers = self.all_numbers or [*self._state.numbers.values()]
        one_each = [1] * len(numbers_now)
        of_pass: list[tuple[Any, ...]] = []
        for note in notes:
            kind = note[0]
            if kind in _BLOCK_NOTES:
                of_pass.append(note)
                continue
            at_ns = note[2]
            if of_pass:
                log.tick(at_ns)
                self._write_blocks(of_pass)
                of_pass = []
            if kind == WHOLE_STEP:
                _, step, _, numbers, tokens, done_ns, limit, free = note
                log.step(
                    step, numbers or numbers_now, tokens or one_each, limit, free, -1, usable - free, at_ns, done_ns
                )
            elif kind == STEP_LAUNCHED:
                _, step, _, numbers, tokens, _, _ = note
                log.step_launched(step, numbers or numbers_now, tokens or one_each, at_ns)
            else:
                _, step, _, duration_ns, limit, free = note
                log.step_completed(step, duration_ns, limit, free, -1, usable - free, at_ns)
        if of_pass:
            self.stamp_time()
            self._write_blocks(of_pass)

    def _write_blocks(self, notes: Iterable[tuple[Any, ...]]) -> None:
        numbers = self._state.numbers
        for kind, request_id, blocks, group in notes:
            number = numbers.get(request_id, NO_REQUEST)
            if kind == CACHED:
                self.write_cached(self.log, number, blocks)
            else:
                self._write_allocated(number, blocks, group)

    def _write_allocated(self, number: int, blocks: Sequence[Any], group: int) -> None:
        ids: list[int] = []
        evicted: list[bytes] = []
        hashes = self.hashes
        for one in blocks:
            block: int = one.block_id
            ids.append(block)
            if block in hashes:
                evicted.append(hashes.pop(block))
        self.log.allocated(number, ids, evicted, group)

    def write_cached(self, log: EventLog, number: int, blocks: Iterable[Any]) -> None:
        """Log that these blocks entered the prefix cache, those without a hash excepted."""
        ids: list[int] = []
        contents: list[bytes] = []
        for one in blocks:
            value = one.block_hash
            if value is not None and not one.is_null:
                block = one.block_id
                raw = self.hashes[block] = value if isinstance(value, bytes) else repr(value).encode()
                ids.append(block)
                contents.append(raw)
        if ids:
            log.cached(number, ids, contents)

    def write_evicted(self, blocks: Sequence[int], cause: Evict) -> None:
        """Log that these blocks lost their contents, those that had none excepted."""
        self.write_notes()
        known = [block for block in blocks if self.hashes.pop(block, None) is not None]
        if known:
            self.stamped.evicted(known, cause)


def _keyed(keyed: Callable[..., Any], value: bytes) -> int:
    """Return 64 bits that distinguish equal prefixes from others and reveal nothing more, never 0."""
    return int.from_bytes(keyed(value).digest(), sys.byteorder, signed=True) or 1
