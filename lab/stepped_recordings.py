"""Recordings made in the lab, for tests that need a target on disk."""

from __future__ import annotations

from pathlib import Path

from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.wire import encode

from .stepped_engine import Lab


def leaking_lab() -> Lab:
    """Finished requests whose completion is never delivered, seen for longer than a slow transfer is information."""
    lab = Lab(total=101, block_size=16, connector_share=1.0, faults=["leak.finished-held:after=3:limit=4"], seed=1)
    for n in range(7):
        lab.arrive(60, max_tokens=4, name=f"req-{n}")
        lab.run_until_idle()
    for _ in range(160):
        lab.step(seconds=0.5)
    return lab


def healthy_lab() -> Lab:
    """Requests come, run and go."""
    lab = Lab(total=101, block_size=16, seed=2)
    for n in range(20):
        lab.arrive(20 + n, max_tokens=6, name=f"req-{n}")
        lab.step()
    lab.run_until_idle()
    for _ in range(60):
        lab.step(seconds=0.5)
    return lab


def recording_of(lab: Lab, directory: Path) -> Path:
    """All that the lab ever sent, as `monitor record` would have kept it."""
    writer = JournalWriter(directory, lab.packer.epoch)
    for frame in lab.frames:
        writer.append(encode(frame), frame.sequence)
    writer.close()
    return directory
