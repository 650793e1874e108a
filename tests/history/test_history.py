"""The past as it was: what is read of any moment is what a fold from the start gives."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.fuzzing.mutations import segment_of
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.wire import Batch, Frame, encode
from kvscope.monitor.history import sealed_segment
from kvscope.monitor.history.history import GAP_NS, History, NotKept
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import directory_of, history_segments
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.ledger.event_history import scan_events
from kvscope.monitor.ledger.fold import apply_events
from tests.history.recorded import folded, ledger_state, state_of, worked, write

SMALL = 20_000
"""Bytes of a segment: a few of them for a short run."""


def with_keyframes(steps: int = 300, every: int = 40, seed: int = 0) -> tuple[Lab, list[Frame]]:
    """A lab that has worked, and its frames with keyframes among them."""
    lab = Lab(total=120, connector_share=0.4, seed=seed)
    frames: list[Frame] = list(lab.frames)
    for step in range(steps):
        if lab.rng.random() < 0.3:
            lab.arrive(lab.rng.randint(1, 60), max_tokens=lab.rng.randint(1, 30))
        before = len(lab.frames)
        lab.step()
        frames += lab.frames[before:]
        if step % every == every - 1:
            frames.append(lab.keyframe())
    return lab, frames


def kept(directory: Path, frames: list[Frame], which: str) -> History:
    """The frames as a recording in several segments, or as a history some or all of whose segments are closed."""
    into = directory if which == "recording" else directory_of(directory, frames[0].engine)
    write(into, frames, SMALL)
    opened = journal.journal_segments(into)
    assert len(opened) > 3
    for segment in {"recording": [], "some closed": opened[:2], "all closed": opened}[which]:
        assert close(segment.path, into) is not None
        assert not segment.path.exists()
    assert len(history_segments(into)) == len(opened)
    return History(directory)


KEPT = pytest.mark.parametrize("which", ["recording", "some closed", "all closed"])


@pytest.mark.slow
@KEPT
def test_any_moment_is_the_fold_of_all_that_came_before(tmp_path: Path, which: str) -> None:
    _, frames = with_keyframes()
    history = kept(tmp_path, frames, which)
    (engine,) = history.engines()
    span = history.span(engine)
    assert span is not None
    assert (span.from_ns, span.to_ns, span.gaps) == (frames[0].wall_ns, max(f.wall_ns for f in frames), [])
    rng = random.Random(1)
    expected, rest = EngineLedger(engine), [frame for frame in frames if isinstance(frame, Batch)]
    moments = (span.from_ns, span.to_ns, *(rng.randint(span.from_ns, span.to_ns) for _ in range(50)))
    for at_ns in sorted(moments):
        while rest and rest[0].wall_ns <= at_ns:
            expected.apply(rest.pop(0))
        ledger = history.ledger_at(engine, at_ns)
        assert ledger_state(ledger) == ledger_state(expected)
        assert ledger.now_ns == at_ns


@KEPT
def test_just_after_an_event_is_the_fold_up_to_it(tmp_path: Path, which: str) -> None:
    lab, frames = with_keyframes(120)
    history = kept(tmp_path, frames, which)
    rng = random.Random(2)
    placed = list(scan_events((frame for frame in lab.frames if isinstance(frame, Batch)), None))
    for position, _, _ in rng.sample(placed, 30):
        expected = EngineLedger(lab.packer.engine)
        for frame in lab.frames:
            if frame.sequence < position.sequence:
                expected.apply(frame)
        batch = next(frame for frame in lab.frames if frame.sequence == position.sequence)
        assert isinstance(batch, Batch)
        runs: list[int] = []
        args: list[int] = []
        ids: list[int] = []
        for event in list(batch.events())[: position.event + 1]:
            runs += (event.kind, event.group, event.request, len(event.args), len(event.ids))
            args += event.args
            ids += event.ids
        apply_events(expected.state, runs, args, ids, batch.texts, position.sequence)
        ledger = history.ledger_at_position(lab.packer.engine, position)
        assert state_of(ledger) == state_of(expected)


@KEPT
def test_points_and_batches_of_a_window(tmp_path: Path, which: str) -> None:
    lab, frames = with_keyframes()
    history = kept(tmp_path, frames, which)
    batches = [frame for frame in frames if isinstance(frame, Batch)]
    since, until = batches[100].wall_ns, batches[200].wall_ns
    within = [batch for batch in batches if since <= batch.wall_ns <= until]
    assert [encode(batch) for batch in history.batches(lab.packer.engine, since, until)] == list(map(encode, within))
    whole = folded(frames, batches[-1].wall_ns)
    reported = {point.at_ns: point for point in history.points(lab.packer.engine, since, until)}
    assert reported
    for at_ns, point in reported.items():
        assert since <= at_ns <= until
        assert point.balance == folded(frames, at_ns).balance()
    assert len(history.points(lab.packer.engine, 0, until + 1, 7)) <= 7
    assert history.points(lab.packer.engine, 0, 1 << 62)[-1] == whole.points[-1]


def test_what_is_not_kept_is_said(tmp_path: Path) -> None:
    lab = worked(20)
    write(tmp_path, list(lab.frames))
    history = History(tmp_path)
    engine = lab.packer.engine
    with pytest.raises(NotKept, match="begins at"):
        history.ledger_at(engine, lab.frames[0].wall_ns - 1)
    with pytest.raises(NotKept, match="nothing is kept of 'another'"):
        history.ledger_at("another", lab.frames[0].wall_ns)
    with pytest.raises(NotKept, match="position 1/0/0"):
        history.ledger_at_position(engine, Position(1, 0, 0))
    assert history.span("another") is None
    with pytest.raises(journal.NotAJournal, match="is not a directory"):
        History(tmp_path / "nothing")


def test_a_hole_and_a_torn_tail_are_gaps(tmp_path: Path) -> None:
    lab = worked(50)
    write(tmp_path, list(lab.frames))
    heard_until = lab.frames[-1].wall_ns
    assert isinstance(lab.clock, VirtualClock)
    lab.clock.sleep(2 * GAP_NS / 1e9)
    joined = len(lab.frames)
    frames: list[Frame] = [lab.keyframe()]
    for _ in range(20):
        lab.step()
    frames += lab.frames[joined:]
    write(tmp_path, frames)
    *_, last = journal.journal_segments(tmp_path)
    last.path.write_bytes(last.path.read_bytes()[:-5])
    span = History(tmp_path).span(lab.packer.engine)
    assert span is not None
    assert [life.epoch for life in span.kept_epochs] == [lab.packer.epoch]
    hole, tail = span.gaps
    assert (hole.from_ns, hole.to_ns, hole.bytes_lost) == (heard_until, frames[0].wall_ns, 0)
    assert tail.bytes_lost == journal.tail_lost(last.path)
    assert tail.from_ns == span.to_ns == lab.frames[-2].wall_ns


def test_a_history_grows_while_it_is_read(tmp_path: Path) -> None:
    lab = worked(30)
    writer = journal.JournalWriter(tmp_path, lab.packer.epoch)
    history: History | None = None
    for frame in lab.frames:
        writer.append(encode(frame), frame.sequence)
        history = history or History(tmp_path)
        assert ledger_state(history.ledger_at(lab.packer.engine, frame.wall_ns)) == ledger_state(
            folded(lab.frames, frame.wall_ns)
        )
    writer.close()


PARTS = """
import resource, sys
from pathlib import Path
from kvscope.monitor.history.sealed_segment import write_tables

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

small, large, into = map(Path, sys.argv[1:])
write_tables(small, into / "small")  # what comes with the first
before = peak()
write_tables(large, into / "large")
print(peak() - before)
"""


def test_a_segment_is_closed_a_part_at_a_time(tmp_path: Path) -> None:
    """One of 24 MiB took 90 MiB more, and one of 64 MiB, the largest, 240."""
    lab, frames = with_keyframes(200)
    name = f"{lab.packer.epoch:020d}-{0:015d}.kvj"
    small, large = tmp_path / "1" / name, tmp_path / "2" / name
    segment = segment_of([encode(frame) for frame in frames])
    for path, times in ((small, 1), (large, (24 << 20) // len(segment))):
        path.parent.mkdir()
        path.write_bytes(segment + segment[len(journal.HEADER) :] * times)
    command = [sys.executable, "-c", PARTS, str(small), str(large), str(tmp_path)]
    took = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert took < 40 << 20


def test_parts_are_those_of_one_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them the times of events, which go on from the last event before them that has one."""
    _, frames = with_keyframes(60)
    tables = []
    for part_bytes in (1, 3_000, 64 << 20):
        monkeypatch.setattr(sealed_segment, "FRAMES_TOGETHER_BYTES", part_bytes)
        write(tmp_path / str(part_bytes), frames)
        (segment,) = history_segments(tmp_path / str(part_bytes))
        closed = close(segment.path, segment.path.parent)
        assert closed is not None
        tables.append({file.name: pq.read_table(file) for file in sorted(closed.path.iterdir())})
    for name, whole in tables[-1].items():
        for parts in tables[:-1]:
            assert parts[name].schema == whole.schema
            assert parts[name].to_pylist() == whole.to_pylist(), name
