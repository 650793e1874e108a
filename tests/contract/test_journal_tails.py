"""What a power cut leaves at the end of a journal: zeros, which are no records."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.lab.stepped_recordings import healthy_lab, recording_of
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.journal import JournalWriter
from kvscope.monitor.contract.wire import encode
from kvscope.monitor.history.segment_readers import Opened
from kvscope.monitor.sources.recording import Recording


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    recording_of(healthy_lab(), tmp_path)
    (found,) = journal.journal_segments(tmp_path)
    return found.path


@pytest.mark.parametrize("zeros", [8, 9, 4096, 4 << 20])
def test_zeros_end_a_segment_and_are_named(segment: Path, zeros: int) -> None:
    whole = list(journal.read_segment(segment))
    with segment.open("ab") as file:
        file.write(bytes(zeros))
    assert list(journal.read_segment(segment)) == whole
    assert journal.tail_lost(segment) == zeros
    assert journal.damaged_at(segment) is None
    recording = Recording(segment.parent)
    frames = list(recording)
    assert frames
    notes = recording.status().notes
    assert [f"{zeros} bytes" in note for note in notes] == [True]
    assert recording.bad_frames == 0


def test_the_service_reads_no_record_out_of_zeros(segment: Path) -> None:
    opened = Opened(segment)
    opened.refresh()
    with segment.open("ab") as file:
        file.write(bytes(1 << 20))
    again = Opened(segment)
    again.refresh()
    assert again.bytes_lost == 1 << 20
    assert len(again.index.place) == len(opened.index.place)
    assert len(again.notes) == len(opened.notes)


def test_records_behind_one_of_length_zero_are_damage_that_is_named(segment: Path) -> None:
    content = segment.read_bytes()
    segment.write_bytes(content + bytes(8) + content[8:])
    assert journal.damaged_at(segment) == len(content)
    recording = Recording(segment.parent)
    list(recording)
    assert f"byte {len(content)}" in recording.status().notes[0]


def test_a_journal_is_its_owners_alone(tmp_path: Path) -> None:
    lab = Lab()
    writer = JournalWriter(tmp_path / "new" / "journal", lab.packer.epoch)
    writer.append(encode(lab.frames[0]), 0)
    writer.close()
    for path in (tmp_path / "new" / "journal").rglob("*"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new" / "journal").stat().st_mode & 0o777 == 0o700
