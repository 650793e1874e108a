"""Journals: kept, rotated, dropped when too large, readable after a crash at any byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, Keyframe, decode, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.sources.recording import Recording


def write(path: Path, lab: Lab, **settings: float) -> journal.JournalWriter:
    writer = journal.JournalWriter(path, lab.packer.epoch, clock=lab.clock, **settings)  # type: ignore[arg-type]
    for frame in lab.frames:
        writer.append(encode(frame), frame.sequence)
    writer.close()
    return writer


def busy_lab(steps: int = 30) -> Lab:
    lab = Lab(total=60)
    for _ in range(steps):
        lab.arrive(12, max_tokens=4)
        lab.step()
    return lab


def test_it_opens_after_truncation_at_every_byte_of_its_last_batch(tmp_path: Path) -> None:
    lab = busy_lab()
    write(tmp_path / "whole", lab)
    (segment,) = journal.journal_segments(tmp_path / "whole")
    content = segment.path.read_bytes()
    last = len(encode(lab.frames[-1])) + journal.RECORD.size
    whole = list(journal.read(tmp_path / "whole"))
    assert len(whole) == len(lab.frames)
    cut = tmp_path / "cut" / segment.path.name
    cut.parent.mkdir()
    for end in range(len(content) - last, len(content)):
        cut.write_bytes(content[:end])
        assert list(journal.read_segment(cut)) == whole[:-1]
        assert journal.tail_lost(cut) == end - (len(content) - last)
    recording = Recording(cut.parent)
    ledger = EngineLedger(lab.packer.engine)
    for frame in recording:
        ledger.apply(frame)
    assert recording.bytes_lost == last - 1
    assert ledger.sequence == lab.frames[-2].sequence
    assert ledger.balance().holds


def test_truncation_inside_the_header_is_an_empty_segment(tmp_path: Path) -> None:
    write(tmp_path, busy_lab(1))
    (segment,) = journal.journal_segments(tmp_path)
    content = segment.path.read_bytes()
    for end in range(len(journal.HEADER) + 1):
        segment.path.write_bytes(content[:end])
        assert list(journal.read_segment(segment.path)) == []


def test_damage_inside_a_record_ends_the_segment_there(tmp_path: Path) -> None:
    lab = busy_lab()
    write(tmp_path, lab)
    (segment,) = journal.journal_segments(tmp_path)
    content = bytearray(segment.path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.path.write_bytes(bytes(content))
    read = list(journal.read(tmp_path))
    assert 0 < len(read) < len(lab.frames)
    assert read == [encode(frame) for frame in lab.frames[: len(read)]]


def test_each_segment_can_be_read_on_its_own(tmp_path: Path) -> None:
    lab = Lab(total=60)
    writer = journal.JournalWriter(
        tmp_path, lab.packer.epoch, lambda: encode(lab.keyframe()), segment_bytes=4000, clock=lab.clock
    )
    for _ in range(120):
        lab.arrive(12, max_tokens=4)
        seen = len(lab.frames)
        lab.step()
        for frame in lab.frames[seen:]:
            writer.append(encode(frame), frame.sequence)
    writer.close()
    found = journal.journal_segments(tmp_path)
    assert len(found) > 3
    for segment in found:
        frames = [decode(payload) for payload in journal.read_segment(segment.path)]
        assert isinstance(frames[0], Keyframe)
        ledger = EngineLedger(lab.packer.engine)
        for frame in frames:
            assert frame is not None
            ledger.apply(frame)
        assert ledger.balance().holds
        assert not ledger.losses
    assert ledger.state.counts_match(*lab.pool.counts()[:3])


def test_the_oldest_segments_go_first(tmp_path: Path) -> None:
    lab = busy_lab(200)
    write(tmp_path, lab, segment_bytes=2000, keep_bytes=10_000)
    kept = journal.journal_segments(tmp_path)
    assert sum(segment.path.stat().st_size for segment in kept) < 13_000
    last = [decode(payload) for payload in journal.read_segment(kept[-1].path)][-1]
    assert isinstance(last, Batch)
    assert last.sequence == lab.frames[-1].sequence


def test_read_since_begins_at_or_before_what_was_asked(tmp_path: Path) -> None:
    lab = busy_lab(100)
    write(tmp_path, lab, segment_bytes=2000)
    for wanted in (0, 17, 63, lab.frames[-1].sequence):
        frames = [decode(payload) for payload in journal.read_since(tmp_path, lab.packer.epoch, wanted)]
        sequences = [frame.sequence for frame in frames if frame is not None]
        assert sequences[0] <= wanted
        assert sequences == list(range(sequences[0], lab.frames[-1].sequence + 1))


def test_what_is_no_journal_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(journal.NotAJournal, match="holds no recording"):
        list(journal.read(tmp_path))
    other = tmp_path / "00000000000000000001-000000000000001.kvj"
    other.write_bytes(b"something else entirely")
    with pytest.raises(journal.NotAJournal, match="not a segment"):
        list(journal.read(tmp_path))
