"""History of engines whose wall clock was set back: each moment is found by stream time, which never goes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvscope.engine.bench.clock import VirtualClock
from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.wire import Batch, Keyframe
from kvscope.monitor.history import segment_writer
from kvscope.monitor.history.history import History
from kvscope.monitor.history.sealed_segment import close
from kvscope.monitor.history.segment_files import history_segments
from kvscope.monitor.ledger.engine_ledger import EngineLedger, Position
from kvscope.monitor.ledger.partial_replay import observed
from tests.history.recorded import ledger_state
from tests.history.test_writer import ReceivedRecords

HOUR_NS = 3_600_000_000_000
SECOND_NS = 1_000_000_000


class SetClock(VirtualClock):
    """A clock whose wall time can be set back."""

    behind_ns = 0

    def time_ns(self) -> int:
        return super().time_ns() - self.behind_ns


def work(lab: Lab, steps: int) -> list[Batch]:
    first = len(lab.frames)
    for step in range(steps):
        if lab.rng.random() < 0.3:
            lab.arrive(lab.rng.randint(1, 60), max_tokens=lab.rng.randint(1, 30))
        lab.step(0.5)
        if step % 2:
            lab.clock.sleep(0.1)  # type: ignore[attr-defined]
            lab.heartbeat()
    return [frame for frame in lab.frames[first:] if isinstance(frame, Batch)]


def close_all(received: ReceivedRecords) -> None:
    received.writer.stop(received.ledger)
    for segment in history_segments(received.directory):
        close(segment.path, received.directory)


def assert_found(history: History, name: str, live: EngineLedger, moments: list[tuple[int, Position, object]]) -> None:
    """At each of the stream times the state is the one that the live ledger had."""
    for at_ns, position, expected in moments:
        then = history.ledger_at(name, at_ns)
        assert (then.position(), ledger_state(then)) == (position, expected), at_ns
        assert then.now_ns == at_ns
        assert then.now_ns - then.last_received_ns < SECOND_NS, "the engine was received then"
        assert list(history.batches(name, at_ns - 4 * SECOND_NS, at_ns))[-1].sequence == position.sequence
    kept = history.points(name, moments[0][0], moments[-1][0], 1 << 30)
    assert kept == [point for point in live.points if moments[0][0] <= point.at_ns <= moments[-1][0]]


def hear_all(received: ReceivedRecords, batches: list[Batch], moments: list[tuple[int, Position, object]]) -> None:
    for number, batch in enumerate(batches):
        received.receive([batch])
        if number % 40 == 20:
            moments.append((received.ledger.now_ns, received.ledger.position(), ledger_state(received.ledger)))


@pytest.mark.parametrize("closed", [False, True])
def test_one_life_whose_clock_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool) -> None:
    monkeypatch.setattr(segment_writer, "SEGMENT_BYTES", 15_000)
    clock = SetClock()
    lab = Lab(total=120, clock=clock)
    received = ReceivedRecords(tmp_path, lab)
    moments: list[tuple[int, Position, object]] = []
    received.receive(lab.frames)
    hear_all(received, work(lab, 120), moments)
    clock.behind_ns = HOUR_NS
    hear_all(received, work(lab, 200), moments)
    assert len(history_segments(received.directory)) > 4
    if closed:
        close_all(received)
    assert_found(History(tmp_path), lab.packer.engine, received.ledger, moments)


@pytest.mark.parametrize("closed", [False, True])
def test_a_later_life_with_an_earlier_clock(tmp_path: Path, closed: bool) -> None:
    clock = SetClock()
    first = Lab(total=120, clock=clock)
    received = ReceivedRecords(tmp_path, first)
    moments: list[tuple[int, Position, object]] = []
    received.receive(first.frames)
    hear_all(received, work(first, 100), moments)
    for _ in range(6):  # what a source adds while it receives nothing
        clock.sleep(1)
        received.receive([observed(first.packer.engine, received.ledger.epoch, received.ledger.now_ns + SECOND_NS)])
    clock.behind_ns = HOUR_NS
    second = Lab(total=120, clock=clock, seed=1)
    assert second.packer.epoch < first.packer.epoch
    received.receive([second.keyframe()])
    hear_all(received, work(second, 100), moments)
    assert received.ledger.epoch == second.packer.epoch
    assert {segment.epoch for segment in history_segments(received.directory)} == {
        first.packer.epoch,
        second.packer.epoch,
    }
    if closed:
        close_all(received)
    history = History(tmp_path)
    assert_found(history, first.packer.engine, received.ledger, moments)
    span = history.span(first.packer.engine)
    assert span is not None
    assert span.from_ns == first.frames[0].wall_ns
    assert span.to_ns == pytest.approx(received.ledger.now_ns, abs=SECOND_NS)
    assert history.last_ns(first.packer.engine) == pytest.approx(received.ledger.now_ns, abs=SECOND_NS)


def test_another_engine_of_the_name_begins_no_segment_while_this_one_lives(tmp_path: Path) -> None:
    clock = SetClock()
    first = Lab(total=120, clock=clock)
    received = ReceivedRecords(tmp_path, first)
    received.receive(first.frames)
    clock.behind_ns = HOUR_NS
    other = Lab(total=120, clock=clock, seed=1)
    clock.behind_ns = 0
    for _ in range(20):
        work(first, 2)
        received.receive([*first.frames[-2:], other.heartbeat(), other.keyframe()])
    assert len(history_segments(received.directory)) == 1
    assert received.ledger.epoch == first.packer.epoch


def test_a_history_of_a_clock_that_went_on_is_read_in_one_run(tmp_path: Path) -> None:
    clock = SetClock()
    lab = Lab(total=120, clock=clock)
    received = ReceivedRecords(tmp_path, lab)
    received.receive(lab.frames)
    moments: list[tuple[int, Position, object]] = []
    hear_all(received, work(lab, 60), moments)
    clock.behind_ns = -HOUR_NS  # set forward: a gap in wall time, and none in stream time
    hear_all(received, work(lab, 60), moments)
    frames = [frame for frame in lab.frames if isinstance(frame, Batch | Keyframe)]
    assert frames[-1].wall_ns - received.ledger.now_ns > HOUR_NS // 2
    assert_found(History(tmp_path), lab.packer.engine, received.ledger, moments)
