"""What a service keeps of an engine: all that it hears, keyframes that do not outweigh it, segments that end."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.kinds import Kind, Stage
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.contract.wire import Batch, Frame, Keyframe, decode, encode
from kvscope.monitor.history import segment_writer
from kvscope.monitor.history.history import History
from kvscope.monitor.history.retention import HistoryInUse, Keep, Keeper
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import closed_segments, directory_of, history_segments
from kvscope.monitor.history.segment_readers import Opened
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.ledger_records import BATCH_OVERHEAD
from kvscope.monitor.sources.live_stream import Received
from tests.history.recorded import folded, ledger_state, worked
from tests.waiting import PATIENCE_S

AT_ONCE = 3
"""Frames that a reader takes in one go."""


class ReceivedRecords:
    """An engine that is heard, kept and fed to a ledger, as a reader of the service does it."""

    def __init__(self, directory: Path, lab: Lab, ledger: EngineLedger | None = None) -> None:
        self.directory = directory_of(directory, lab.packer.engine)
        self.ledger = ledger or EngineLedger(lab.packer.engine)
        self.ended: list[Path] = []
        self.writer = segment_writer.Writer(self.directory, self.ended.append, lab.clock)

    def receive(self, frames: Sequence[Frame]) -> None:
        for first in range(0, len(frames), AT_ONCE):
            few = frames[first : first + AT_ONCE]
            self.writer.keep([Received(frame, encode(frame)) for frame in few], self.ledger)
            for frame in few:
                self.ledger.apply(frame)

    def payloads(self) -> list[bytes]:
        """All that is in the journals."""
        return list(journal.read(self.directory))


def test_what_is_heard_is_kept_in_segments_that_can_be_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 30_000)
    lab = worked(400)
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    received.writer.stop(received.ledger)
    found = journal.journal_segments(received.directory)
    assert len(found) > 3
    assert received.ended == [segment.path for segment in found[:-1]]
    frames = [decode(payload) for payload in received.payloads()]
    assert [encode(f) for f in frames if isinstance(f, Batch)] == [encode(f) for f in lab.frames]
    for segment in found[1:]:
        # Of a point, who reads frames gets nothing.
        first, *rest = (f for f in map(decode, journal.read_segment(segment.path)) if f is not None)
        assert isinstance(first, Keyframe)
        alone, whole = EngineLedger(lab.packer.engine), EngineLedger(lab.packer.engine)
        for frame in (first, *rest):
            alone.apply(frame)
        for batch in lab.frames[: alone.sequence + 1]:
            whole.apply(batch)
        assert ledger_state(alone) == ledger_state(whole)
    history = History(tmp_path)
    reported = history.points(lab.packer.engine, 0, lab.frames[-1].wall_ns, 1 << 30)
    assert reported == list(received.ledger.points)[-len(reported) :]
    assert len(reported) > len(received.ledger.points) - AT_ONCE


def test_keyframes_do_not_outweigh_the_events(tmp_path: Path) -> None:
    """Nor those that the engine sends for who joins: a large pool that does nothing says next to nothing."""
    lab = Lab(total=2_000)
    frames: list[Frame] = [*lab.frames]
    for step in range(400):
        if step % 4 == 0:
            lab.arrive(60, max_tokens=20)
        before = len(lab.frames)
        lab.step()
        frames += lab.frames[before:]
        if step % 20 == 0:
            frames.append(lab.keyframe())
    received = ReceivedRecords(tmp_path, lab)
    received.receive(frames)
    sizes = {"K": 0, "B": 0, "P": 0}
    for payload in received.payloads():
        sizes[chr(payload[4])] += len(payload)
    assert 0 < sizes["K"] * (segment_writer.OUTWEIGHS - 1) < sizes["B"] + sizes["P"]
    assert sum(len(encode(frame)) for frame in frames if isinstance(frame, Keyframe)) > sizes["B"]
    until_idle = len(received.payloads())
    assert isinstance(lab.clock, VirtualClock)
    for _ in range(30):  # the segment is old, and ends only when it is worth it
        lab.clock.sleep(segment_writer.SEGMENT_S / 10)
        received.receive([lab.heartbeat()])
        received.receive([lab.keyframe()])
    assert not received.ended
    assert {chr(payload[4]) for payload in received.payloads()[until_idle:]} == {"B", "P"}


def test_a_service_that_starts_again_goes_on_where_it_was(tmp_path: Path) -> None:
    lab = worked(100)
    before = ReceivedRecords(tmp_path, lab)
    before.receive(lab.frames)
    before.writer.stop(before.ledger)
    for again in range(3):
        joined = len(lab.frames)
        for _ in range(again * 10):
            lab.step()
        after = ReceivedRecords(
            tmp_path, lab, History(tmp_path).ledger_at(lab.packer.engine, lab.frames[joined - 1].wall_ns)
        )
        after.receive(lab.frames[joined:])
        after.receive([lab.heartbeat()])
        after.writer.stop(after.ledger)
    for segment in history_segments(after.directory)[:2]:
        assert close(segment.path, after.directory) is not None
    history = History(tmp_path)
    batches = list(history.batches(lab.packer.engine, 0, 1 << 62))
    assert [batch.sequence for batch in batches] == [frame.sequence for frame in lab.frames]
    last = lab.frames[-1].wall_ns
    assert ledger_state(history.ledger_at(lab.packer.engine, last)) == ledger_state(folded(list(lab.frames), last))


def hear_with_a_full_disk(received: ReceivedRecords, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for the second third of the frames."""
    third = len(lab.frames) // 3
    received.receive(lab.frames[:third])

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        received.receive(lab.frames[third : 2 * third])
        assert "No space left" in received.writer.error
    assert isinstance(lab.clock, VirtualClock)
    lab.clock.sleep(segment_writer.RETRY_NS / 1e9)
    received.receive(lab.frames[2 * third :])
    assert received.writer.error == ""


def lost_of(history: History, lab: Lab) -> list[list[int]]:
    batches = history.batches(lab.packer.engine, 0, 1 << 62)
    return [event.args for batch in batches for event in batch.events() if event.kind == Kind.LOST]


def test_what_a_full_disk_refused_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = worked(90)
    received = ReceivedRecords(tmp_path, lab)
    hear_with_a_full_disk(received, lab, monkeypatch)
    history = History(tmp_path)
    assert lost_of(history, lab) == []
    assert [b.sequence for b in history.batches(lab.packer.engine, 0, 1 << 62)] == [f.sequence for f in lab.frames]
    for frame in lab.frames[::7]:
        expected = ledger_state(folded(list(lab.frames), frame.wall_ns))
        assert ledger_state(history.ledger_at(lab.packer.engine, frame.wall_ns)) == expected


def test_what_is_in_memory_no_more_by_then_is_said_to_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = worked(90)
    received = ReceivedRecords(tmp_path, lab)
    received.ledger.max_recent_bytes = 10 * BATCH_OVERHEAD
    hear_with_a_full_disk(received, lab, monkeypatch)
    history = History(tmp_path)
    kept = [batch.sequence for batch in history.batches(lab.packer.engine, 0, 1 << 62) if batch.sequence >= 0]
    missing = sorted({frame.sequence for frame in lab.frames} - set(kept))
    assert missing
    assert lost_of(history, lab) == [[missing[0], missing[-1], Stage.JOURNAL]]
    assert missing == list(range(missing[0], missing[-1] + 1))
    ledger = history.ledger_at(lab.packer.engine, lab.frames[-1].wall_ns)
    assert ledger_state(ledger) == ledger_state(folded(list(lab.frames), lab.frames[-1].wall_ns))


def test_figures_of_a_page_are_kept(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, Keep())
    engine = "m@127.0.0.1:8000/0"
    stated: list[Sample | Fact] = [
        Fact(engine, "", "version", "1", 5),
        *(Sample(engine, f"scrape {at}", at, running=at, usage=0.5) for at in range(10, 40)),
    ]
    keeper.note(stated[:20])
    keeper.note(stated[20:])
    keeper.stop([])
    history = History(tmp_path)
    assert list(history.notes(engine, 5, 100)) == stated
    assert list(history.notes(engine, 12, 13)) == stated[3:5]
    (segment,) = history_segments(directory_of(tmp_path, engine))
    assert close(segment.path, segment.path.parent) is not None
    assert list(History(tmp_path).notes(engine, 5, 100)) == stated
    assert history.span(engine) is None


def test_what_is_too_old_or_too_much_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 10_000)
    lab = worked(400)
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    for path in received.ended:
        assert close(path, received.directory) is not None
    closed = sorted(closed_segments(received.directory))
    assert len(closed) > 6
    day_ns = 86_400_000_000_000
    keeper = Keeper(tmp_path, Keep(days=1))
    keeper.drop(closed[2].to_ns + day_ns)
    assert sorted(closed_segments(received.directory)) == closed[2:]
    keeper.stop([])

    def size() -> int:
        return sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())

    keeper = Keeper(tmp_path, Keep(days=1, bytes=size() - 1))
    keeper.drop(closed[-1].to_ns)
    assert sorted(closed_segments(received.directory)) == closed[3:]
    assert size() <= keeper.keep_no_more_than.bytes
    keeper.keep_no_more_than = Keep(days=0)
    keeper.drop(closed[-1].to_ns + day_ns)
    assert history_segments(received.directory) == [history_segments(received.directory)[-1]]
    assert History(tmp_path).span(lab.packer.engine) is not None
    keeper.stop([])


def test_what_a_crash_left_half_done_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-written Parquet is not looked at; a segment that is there twice counts once."""
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 20_000)
    lab = worked(300)
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    received.writer.stop(received.ledger)
    first, second, *_ = history_segments(received.directory)
    content = first.path.read_bytes()
    closed = close(first.path, received.directory)
    assert closed is not None
    first.path.write_bytes(content)  # the crash came before the journal went
    half = closed.path.parent / f".{second.path.stem}-{0:020d}-{1:020d}"
    half.mkdir()
    (half / "events.parquet").write_bytes(b"PAR1 torn")
    last = lab.frames[-1].wall_ns
    expected = ledger_state(folded(list(lab.frames), last))
    assert ledger_state(History(tmp_path).ledger_at(lab.packer.engine, last)) == expected
    keeper = Keeper(tmp_path, Keep(days=100_000))
    assert not first.path.exists()
    assert not half.exists()
    keeper.start()
    with pytest.raises(HistoryInUse, match="another service"):
        Keeper(tmp_path, Keep())
    wait_until_closed(received.directory)
    keeper.stop([])
    history = History(tmp_path)
    assert ledger_state(history.ledger_at(lab.packer.engine, last)) == expected
    assert [b.sequence for b in history.batches(lab.packer.engine, 0, last)] == [f.sequence for f in lab.frames]


def wait_until_closed(directory: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while journal.journal_segments(directory):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_read_while_it_is_written_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 8_000)
    lab = worked(400)
    engine = lab.packer.engine
    ledger = EngineLedger(engine)
    keeper = Keeper(tmp_path, Keep(days=100_000))
    keeper.start()

    def work() -> None:
        for frame in lab.frames:
            keeper.keep([Received(frame, encode(frame))], ledger)
            ledger.apply(frame)
            time.sleep(0.001)

    working = threading.Thread(target=work)
    working.start()
    try:
        looks = 0
        history = History(tmp_path)
        while working.is_alive() or not looks:
            looks += 1
            received = [batch.sequence for batch in history.batches(engine, 0, 1 << 62)]
            assert received == list(range(len(received)))
            if received:
                assert history.ledger_at(engine, lab.frames[received[-1]].wall_ns).sequence >= received[-1]
                assert history.points(engine, 0, 1 << 62)
    finally:
        working.join()
        keeper.stop([ledger])
    assert looks > 3
    assert len(list(closed_segments(directory_of(tmp_path, engine)))) > 3


@pytest.mark.parametrize("read", ["frames", "kept_notes", "points"])
def test_a_segment_that_is_closed_as_it_is_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    """A reader has found the journal and its rows, and is about to open it, when the keeper of history closes it."""
    lab = worked(60)
    engine = lab.packer.engine
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    received.writer.stop(received.ledger)
    keeper = Keeper(tmp_path, Keep())
    keeper.note([Fact("page", "", "version", "1", 5), Sample("page", "", 6, running=1)])
    keeper.stop([])

    def read_all() -> object:
        history = History(tmp_path)
        batches = [batch.sequence for batch in history.batches(engine, 0, 1 << 62)]
        texts = [text for reader in history.readers(engine) for text in reader.texts()]
        points = history.points(engine, 0, 1 << 62)
        return batches, texts, points, history.facts("page"), list(history.notes("page", 0, 9))

    expected = read_all()
    directories = [directory_of(tmp_path, each) for each in (engine, "page")]
    before = getattr(Opened, read)

    def closed_first(opened: Opened, *arguments: object) -> object:
        with monkeypatch.context() as unpatched:
            unpatched.setattr(Opened, read, before)
            if opened.path.exists():
                close(opened.path, opened.path.parent)
        return before(opened, *arguments)

    monkeypatch.setattr(Opened, read, closed_first)
    assert read_all() == expected
    assert any(list(closed_segments(directory)) for directory in directories)


def test_a_segment_that_is_deleted_as_it_is_read_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 20_000)
    lab = worked(300)
    engine = lab.packer.engine
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    for path in received.ended:
        assert close(path, received.directory) is not None
    history = History(tmp_path)
    first, second, *_ = sorted(closed_segments(received.directory))
    assert history.span(engine) is not None
    reading = history.batches(engine, 0, 1 << 62)
    assert next(reading).sequence == 0
    shutil.rmtree(second.path)
    sequences = [batch.sequence for batch in reading]
    assert sequences[-1] == lab.frames[-1].sequence
    assert len(sequences) < len(lab.frames) - 1
    shutil.rmtree(first.path)
    assert history.points(engine, 0, 1 << 62)
    for asked in (history, History(tmp_path)):
        span = asked.span(engine)
        assert span is not None
        assert not any(gap.bytes_lost for gap in span.gaps)
