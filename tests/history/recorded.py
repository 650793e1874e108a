"""Recordings of random labs, and the plain way to know what they should give: a fold of everything from the start."""

from __future__ import annotations

from pathlib import Path

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, Frame, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.records import UNKNOWN_POSITION
from tests.state_dump import comparable


def worked(steps: int = 300, seed: int = 0, **settings: object) -> Lab:
    """A lab under a random load, with heartbeats."""
    lab = Lab(**{"total": 120, "connector_share": 0.4, "seed": seed, **settings})  # type: ignore[arg-type]
    for step in range(steps):
        if lab.rng.random() < 0.3:
            lab.arrive(lab.rng.randint(1, 60), max_tokens=lab.rng.randint(1, 30))
        lab.step()
        if step % 50 == 49:
            lab.heartbeat()
    return lab


def write(directory: Path, frames: list[Frame], segment_bytes: int = 64 << 20) -> None:
    """The frames as a journal, in segments of about that size."""
    writer = journal.JournalWriter(directory, frames[0].epoch, segment_bytes=segment_bytes)
    for frame in frames:
        writer.append(encode(frame), frame.sequence)
    writer.close()


def folded(frames: list[Frame], until_ns: int) -> EngineLedger:
    """All batches packed until then, one after another."""
    ledger = EngineLedger(frames[0].engine)
    for frame in frames:
        if isinstance(frame, Batch) and frame.wall_ns <= until_ns:
            ledger.apply(frame)
    return ledger


def ledger_state(ledger: EngineLedger) -> object:
    """All that the ledger knows of the pool and of requests, and where it is."""
    return state_of(ledger), ledger.balance(), ledger.position()


def state_of(ledger: EngineLedger) -> object:
    """An audit that was under way at a keyframe does not count for who begins there."""
    ledger.state.audit_cycles = ledger.state.audited_ns = 0
    ledger.state.places.audited = UNKNOWN_POSITION
    return comparable(ledger.state)
