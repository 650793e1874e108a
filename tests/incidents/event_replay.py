"""A second method for the truth: counts references and ends in the raw events, with no ledger, state or detector.

An exact replay of the allocator in some forty lines. It reads what the engine logged up to the end of the drain, where
the truth room reads the engine's own objects.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from kvscope.monitor.events import journal
from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.events.wire import Batch, decode


class Replayed(NamedTuple):
    """Ids of requests that never finished, and blocks that are referenced though no living request has them."""

    unfinished: set[str]
    kept: set[int]


def replay_events(directory: Path) -> Replayed:
    """Replay the recording in `directory`."""
    references: Counter[int] = Counter()
    owned: dict[int, Counter[int]] = defaultdict(Counter)
    names: dict[int, str] = {}
    came: set[int] = set()
    ended: set[int] = set()
    for payload in journal.read(directory):
        frame = decode(payload)
        if not isinstance(frame, Batch):
            continue
        names.update(frame.texts)
        for event in frame.events():
            if event.kind in (Kind.RECEIVED, Kind.ARRIVED):
                came.add(event.request)
            elif event.kind == Kind.FINISHED:
                ended.add(event.request)
            elif event.kind in (Kind.ALLOCATED, Kind.REUSED):
                references.update(event.ids)
                owned[event.request].update(event.ids)
            elif event.kind in (Kind.RELEASED, Kind.DETACHED):
                owned[event.request].subtract(event.ids)
                if event.kind == Kind.RELEASED:
                    references.subtract(event.ids)
            elif event.kind == Kind.RECLAIMED:
                references.subtract(event.ids)
    living: Counter[int] = Counter()
    for number in came - ended:
        living.update(+owned[number])
    kept = {block for block, count in references.items() if count > living[block]}
    return Replayed({names[number] for number in came - ended}, kept)
