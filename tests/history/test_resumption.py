"""Engines that a service takes up where the one before it left them, when clocks were set in between."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Run, batch_of, encode
from kvscope.monitor.history import segment_writer
from kvscope.monitor.history.history import History
from kvscope.monitor.history.segment_files import directory_of, encode_note
from kvscope.monitor.history.segment_writer import Writer
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Point
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.resumption import Resumption
from kvscope.monitor.service.service import Service, ServiceConfig
from kvscope.monitor.sources.live_stream import Received
from tests.history.recorded import worked

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


class _Recent(VirtualClock):
    """Virtual time that began a minute ago."""

    def __init__(self) -> None:
        super().__init__()
        self.began_ns = time.time_ns() - 60 * SECOND

    def time_ns(self) -> int:
        return self.began_ns + self.ns


def restarted(data: Path) -> tuple[list[Point], list[Point]]:
    """The points that a service resumes, and those that are on disk then."""
    service = Service(ServiceConfig(events=(), data=data))
    service.stop()
    resumed = list(service.watch.fleet.engines[RESUMED].points)
    return resumed, History(data / "history").points(RESUMED, 0, 1 << 62, 1 << 30)


@pytest.mark.parametrize("written", [0, 7])
@pytest.mark.parametrize("torn", [b"", b"\x90\0\0\0half a record"])
def test_points_that_a_killed_service_had_not_written_are_written_once(
    tmp_path: Path, written: int, torn: bytes
) -> None:
    """It had written the frames of a burst, and the first of its points."""
    lab = worked(300, clock=_Recent())
    ledger = EngineLedger(RESUMED)
    writer = journal.JournalWriter(directory_of(tmp_path / "history", RESUMED), lab.packer.epoch)
    for frame in lab.frames:
        writer.append(encode(frame), frame.sequence)
        ledger.apply(frame)
    points = list(ledger.points)
    assert len(points) > 20
    for point in points[:written]:
        writer.append(encode_note(point), 0)
    writer.close()
    (left,) = (tmp_path / "history").glob("*/*.kvj")
    with left.open("ab") as file:
        file.write(torn)
    for _ in range(3):
        resumed, kept = restarted(tmp_path)
        assert resumed == kept
        assert [point.at_ns for point in kept] == [point.at_ns for point in points]


def boundaries(kept: bytes) -> list[int]:
    """Where a file of journal records may end: empty, after its header, after each record."""
    found = [0, len(journal.HEADER)]
    while found[-1] < len(kept):
        size, _ = journal.RECORD.unpack_from(kept, found[-1])
        found.append(found[-1] + journal.RECORD.size + size)
    return found


def test_a_service_killed_at_any_byte_goes_on_behind_the_last_batch_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that had only begun a segment: else what it missed would never be asked for."""
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 20_000)
    lab = worked(200, clock=_Recent())
    epoch = lab.packer.epoch
    whole = directory_of(tmp_path / "whole" / "history", RESUMED)
    writer, ledger = Writer(whole, lambda _path: None), EngineLedger(RESUMED)
    for frame in lab.frames:
        writer.keep([Received(frame, encode(frame))], ledger)
        ledger.apply(frame)
    writer.stop(ledger)
    *before, last = sorted(whole.glob("*.kvj"))
    assert len(before) > 3
    kept, wrong = last.read_bytes(), []
    ends = boundaries(kept)
    for end in sorted({*ends, *(end + 3 for end in ends[:-1])}):
        data = tmp_path / f"cut-at-{end}"
        shutil.copytree(whole.parent, data / "history")
        (data / "history" / whole.name / last.name).write_bytes(kept[:end])
        batches = list(History(data / "history").batches(RESUMED, 0, 1 << 62))
        service = Service(ServiceConfig(events=(), data=data))
        goes_on_at = service.watch.fleet.engines[RESUMED].sequence + 1 if service.watch.fleet.engines else -1
        service.stop()
        if goes_on_at != batches[-1].sequence + 1 or {batch.epoch for batch in batches} != {epoch}:
            wrong.append((end, goes_on_at, batches[-1].sequence))
    assert not wrong
