"""What the packer makes of what lies in a log."""

from __future__ import annotations

import time
from hashlib import blake2b

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Kind, Release
from kvscope.monitor.contract.wire import Batch, encode
from kvscope.monitor.probes.packer import Packer, Vitals

RAW = [bytes([index]) * 32 for index in range(1, 4)]


def keyed(raw: bytes) -> int:
    return int.from_bytes(blake2b(raw, digest_size=8, key=b"ours").digest(), "little", signed=True)


def a_log() -> tuple[EventLog, Packer]:
    log = EventLog(time)
    return log, Packer(log, "e", lambda: Vitals(-1, 0, 0, 0, 0, 0, 0))


def say(log: EventLog) -> None:
    """Blocks that are cached, other numbers between, and then handed out anew."""
    log.started(5, 1, 16, "{}")
    log.allocated(1, [1, 2, 3])
    log.cached(1, [1, 2, 3], RAW)
    log.looked_up(2, 7, 9)
    log.flush(0, 0, (1, 0, 3, 5))
    log.allocated(2, [1, 4], [RAW[0]])
    log.flush(1, 1, (0, 0, 4, 5))


def args_of(batch: Batch, kind: Kind) -> list[list[int]]:
    return [list(run.args) for run in batch.events() if run.kind == kind]


def test_hashes_that_may_not_leave_the_process_are_keyed_before_they_are_packed() -> None:
    log, packer = a_log()
    log.keyed = keyed
    say(log)
    (batch,) = packer.pack()
    assert args_of(batch, Kind.CACHED) == [[keyed(raw) for raw in RAW]]
    assert args_of(batch, Kind.ALLOCATED) == [[], [keyed(RAW[0])]]
    assert args_of(batch, Kind.LOOKED_UP) == [[7, 9]]
    assert not any(raw in encode(frame) for frame in (batch, packer.keyframe()) for raw in RAW)
    assert packer.shadow.hashes[2] == keyed(RAW[1])


def test_without_a_key_they_are_not_packed_at_all() -> None:
    log, packer = a_log()
    say(log)
    with pytest.raises(TypeError):
        packer.pack()


def test_a_shadow_that_is_folded_late_gives_the_same_keyframes() -> None:
    keyframes = []
    for late in (False, True):
        log = EventLog(VirtualClock())
        packer = Packer(log, "e", lambda: Vitals(-1, 0, 0, 0, 0, 0, 0), folds_late=late)
        log.keyed = keyed
        say(log)
        packer.pack()
        states = [packer.keyframe().state.tobytes()]
        log.dropped_batches = 1
        log.released(2, [4], Release.FINISHED)
        log.flush(2, 2, (1, 0, 3, 5))
        packer.pack()
        keyframes.append([*states, packer.keyframe().state.tobytes(), packer.keyframe().damaged])
    assert keyframes[0] == keyframes[1]
    assert keyframes[0][0] != keyframes[0][1]
