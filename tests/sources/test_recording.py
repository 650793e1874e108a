"""A recording's keyframes: needed where what is before them is gone, and in the way of the beginning of a life."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, Keyframe, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.recording import Recording
from kvscope.monitor.terminal.cli import main


def worked(directory: Path, segment_bytes: int) -> Lab:
    """A lab, and its journal, each segment of which begins with a keyframe of all that was packed by then."""
    lab = Lab(seed=3)
    writer = journal.JournalWriter(
        directory, lab.packer.epoch, lambda: encode(lab.keyframe()), segment_bytes=segment_bytes, clock=lab.clock
    )
    written = 0
    for step in range(60):
        if step % 4 == 0:
            lab.arrive(12, max_tokens=5)
        lab.step()
        for frame in lab.frames[written:]:
            writer.append(encode(frame), frame.sequence)
        written = len(lab.frames)
    writer.close()
    return lab


def test_a_recording_from_the_start_begins_with_its_first_batch(tmp_path: Path) -> None:
    lab = worked(tmp_path, 1 << 20)
    (segment,) = journal.journal_segments(tmp_path)
    kept = list(journal.read_segment(segment.path))
    frames = list(Recording(tmp_path))
    assert len(kept) == len(lab.frames) + 1
    assert [encode(frame) for frame in frames] == [encode(frame) for frame in lab.frames]
    ledger = EngineLedger(lab.packer.engine)
    for frame in frames:
        ledger.apply(frame)
    assert ledger.recent[0].sequence == 0


def test_what_is_left_of_a_recording_begins_with_its_keyframe(tmp_path: Path) -> None:
    lab = worked(tmp_path, 4_000)
    first, second, *_ = journal.journal_segments(tmp_path)
    assert isinstance(next(iter(Recording(tmp_path))), Batch)
    first.path.unlink()
    frames = list(Recording(tmp_path))
    assert isinstance(frames[0], Keyframe)
    assert frames[0].sequence >= second.first_sequence
    assert isinstance(next(iter(Recording(second.path))), Keyframe)
    ledger = EngineLedger(lab.packer.engine)
    for frame in frames:
        ledger.apply(frame)
    assert (ledger.ready, ledger.sequence, ledger.anomalies) == (True, lab.frames[-1].sequence, [])


def test_the_keyframe_between_two_segments_is_left_out(tmp_path: Path) -> None:
    """The batch that it includes follows it. A reader that took it up would forget what only events show."""
    lab = worked(tmp_path, 4_000)
    assert len(journal.journal_segments(tmp_path)) > 1
    assert [encode(frame) for frame in Recording(tmp_path)] == [encode(frame) for frame in lab.frames]
    ledger = EngineLedger(lab.packer.engine)
    for frame in Recording(tmp_path):
        ledger.apply(frame)
    assert ledger.tally.in_step


def test_the_keyframe_after_a_missing_segment_is_needed(tmp_path: Path) -> None:
    worked(tmp_path, 4_000)
    first, second, third, *_ = journal.journal_segments(tmp_path)
    second.path.unlink()
    (keyframe,) = [frame for frame in Recording(tmp_path) if isinstance(frame, Keyframe)]
    assert third.first_sequence <= keyframe.sequence
    assert first.first_sequence == 0


def test_a_damaged_first_record_is_reported_with_its_file_and_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worked(tmp_path, 1 << 20)
    (segment,) = journal.journal_segments(tmp_path)
    content = bytearray(segment.path.read_bytes())
    content[len(journal.HEADER) + journal.RECORD.size + 5] ^= 0x40
    segment.path.write_bytes(content)
    assert main(["doctor", str(tmp_path), "--format", "short"]) == 3
    reported = " ".join("".join(capsys.readouterr()).split())
    assert f"it is damaged: {segment.path}, the record at byte {len(journal.HEADER)}" in reported


def test_damage_in_the_middle_keeps_what_was_before_it(tmp_path: Path) -> None:
    lab = worked(tmp_path, 1 << 20)
    (segment,) = journal.journal_segments(tmp_path)
    sizes = [journal.RECORD.size + len(payload) for payload in journal.read_segment(segment.path)]
    start = len(journal.HEADER) + sum(sizes[:-1])
    content = bytearray(segment.path.read_bytes())
    content[start + journal.RECORD.size] ^= 1
    segment.path.write_bytes(content)
    recording = Recording(tmp_path)
    assert len(list(recording)) == len(lab.frames) - 1
    assert recording.damage == [f"{segment.path}, the record at byte {start}"]


def test_a_writer_that_was_killed_damages_nothing(tmp_path: Path) -> None:
    worked(tmp_path, 1 << 20)
    (segment,) = journal.journal_segments(tmp_path)
    segment.path.write_bytes(segment.path.read_bytes()[:-3])
    recording = Recording(tmp_path)
    assert list(recording)
    assert recording.damage == []
    assert recording.bytes_lost > 0
