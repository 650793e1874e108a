"""Engines that a service takes up where the one before it left them, when clocks were set in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.monitor.events import journal
from kvscope.monitor.events.kinds import Kind
from kvscope.monitor.events.wire import Run, batch_of, encode
from kvscope.monitor.history.history import History
from kvscope.monitor.history.segment_files import directory_of
from kvscope.monitor.pipeline import Pipeline
from kvscope.monitor.service.resumption import Resumption
from tests.lab import Lab

RESUMED = "lab@127.0.0.1:0/0"
SECOND = 1_000_000_000


def history_until(path: Path, lab: Lab, ahead_ns: int) -> int:
    """Keep the frames of a lab, then what a reader stored a second later whose clock was ahead. Return that time."""
    for _ in range(20):
        lab.arrive(9)
        lab.step()
    last = lab.frames[-1]
    until_ns = last.wall_ns + SECOND + ahead_ns
    mono_ns = last.mono_ns + SECOND
    before = batch_of(
        RESUMED, last.epoch, [Run(Kind.OBSERVED, 0, -1, [last.wall_ns], [])], wall_ns=last.wall_ns, mono_ns=last.mono_ns
    )
    after = batch_of(
        RESUMED, last.epoch, [Run(Kind.OBSERVED, 0, -1, [until_ns], [])], wall_ns=until_ns, mono_ns=mono_ns
    )
    writer = journal.JournalWriter(directory_of(path, RESUMED), last.epoch, lambda: encode(lab.keyframe()))
    for frame in (*lab.frames, before, after):
        writer.append(encode(frame), max(frame.sequence, 0))
    writer.close()
    return until_ns


@pytest.mark.parametrize("ahead_s", [0, 86_400])
def test_time_passes_by_the_clock_that_was_set_and_not_by_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    now_ns = history_until(tmp_path, lab := Lab(), ahead_s * SECOND)
    clock = [now_ns]
    monkeypatch.setattr("kvscope.monitor.service.resumption.time.time_ns", lambda: clock[0])
    pipeline = Pipeline()
    resumption = Resumption(pipeline)
    resumption.resume(History(tmp_path))
    ledger = pipeline.fleet.engines[RESUMED]
    clock[0] += 12 * SECOND
    resumption.watch_for_silence()
    assert 12 <= (ledger.now_ns - ledger.last_received_ns) / SECOND <= 14
    lab.frames.clear()
    lab.arrive(9)
    lab.step()
    pipeline.feed(lab.frames)
    clock[0] += 12 * SECOND
    resumption.watch_for_silence()
    silent_s = (ledger.now_ns - ledger.last_received_ns) / SECOND
    clock[0] += 12 * SECOND
    resumption.watch_for_silence()
    assert (ledger.now_ns - ledger.last_received_ns) / SECOND == silent_s  # received: others watch it
