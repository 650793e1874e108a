"""Several engines, several lives of one, and records of every kind, each in its own ledger."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Stage
from kvscope.monitor.contract.samples import Fact, Sample
from kvscope.monitor.contract.wire import Batch
from kvscope.monitor.ledger.engine_ledger import Fleet, Position, batch_bytes

A, B = "a@127.0.0.1:1/0", "b@127.0.0.1:1/1"


def busy(engine: str, seed: int) -> Lab:
    lab = Lab(engine=engine, seed=seed)
    for _ in range(20):
        lab.arrive(lab.rng.randint(1, 40))
        lab.step()
    return lab


def test_interleaved_engines_do_not_mix() -> None:
    labs = [busy(A, 1), busy(B, 2)]
    fleet = Fleet()
    for frames in zip(*(lab.frames for lab in labs), strict=True):
        for frame in frames:
            assert fleet.apply(frame).engine == frame.engine
    for lab in labs:
        ledger = fleet.engines[lab.packer.engine]
        assert list(ledger.state.refs) == lab.pool.refs
        assert not ledger.anomalies
        assert ledger.position() == Position(lab.packer.epoch, lab.packer.next_sequence - 1)


def test_samples_and_facts_go_by_the_engine_they_name() -> None:
    fleet = Fleet()
    fleet.apply(Sample(A, "a:1", at_ns=5, running=1))
    fleet.apply(Sample(B, "a:2", at_ns=7, running=2))
    fleet.apply(Fact(A, "a:3", "version", "0.32.0", 9))
    a, b = fleet.engines[A], fleet.engines[B]
    assert ([s.running for s in a.samples], [s.running for s in b.samples]) == ([1], [2])
    assert (a.now_ns, b.now_ns) == (9, 7)
    assert a.facts["version"].value == "0.32.0"
    assert not b.facts
    assert not a.has_stream


def test_a_keyframe_of_what_is_known_changes_nothing() -> None:
    lab, fleet = busy(A, 9), Fleet()
    for frame in lab.frames:
        ledger = fleet.apply(frame)
    state, beats = ledger.state, ledger.beats.count
    fleet.apply(lab.keyframe())
    assert ledger.state is state
    assert ledger.beats.count == beats


def test_frames_seen_twice_count_once() -> None:
    lab = busy(A, 3)
    once, twice = Fleet(), Fleet()
    for frame in lab.frames:
        once.apply(frame)
        twice.apply(frame)
        twice.apply(frame)
    assert twice.engines[A].balance() == once.engines[A].balance()
    assert twice.engines[A].state.totals == once.engines[A].state.totals
    assert not twice.engines[A].losses


@pytest.mark.parametrize("missing", [1, 3])
def test_a_gap_is_counted_and_marks_the_figures(missing: int) -> None:
    lab = busy(A, 4)
    fleet = Fleet()
    for frame in lab.frames[:5] + lab.frames[5 + missing :]:
        fleet.apply(frame)
    ledger = fleet.engines[A]
    assert sum(loss.batches for loss in ledger.losses) == missing
    assert ledger.losses[0].position == str(Position(lab.packer.epoch, lab.frames[4].sequence))


def test_another_life_begins_with_empty_books_and_the_old_ones_tail_is_left_out() -> None:
    first, second = busy(A, 5), Lab(engine=A, seed=6)
    later = first.packer.epoch + 1
    fleet = Fleet()
    for frame in first.frames:
        fleet.apply(frame)
    for frame in second.frames:
        ledger = fleet.apply(msgspec.structs.replace(frame, epoch=later))
    assert (ledger.restarts, ledger.epoch) == (1, later)
    assert ledger.balance().running == ledger.balance().waiting == 0
    assert not ledger.state.requests
    position, refs = ledger.position(), list(ledger.state.refs)
    first.step()
    fleet.apply(first.frames[-1])
    assert (ledger.position(), list(ledger.state.refs)) == (position, refs)


def test_a_keyframe_that_cannot_be_read_is_one_lost_batch() -> None:
    lab, fleet = busy(A, 7), Fleet()
    ledger = fleet.apply(msgspec.structs.replace(lab.keyframe(), state=b"?"))
    assert (ledger.lost_batches[Stage.TRANSPORT], [loss.batches for loss in ledger.losses]) == (1, [1])
    assert not ledger.has_stream


def test_a_bounded_number_of_bytes_of_the_last_batches_is_kept() -> None:
    lab, fleet = busy(A, 8), Fleet()
    ledger = fleet.apply(lab.frames[0])
    ledger.max_recent_bytes = sum(batch_bytes(frame) for frame in lab.frames[-3:] if isinstance(frame, Batch))
    for frame in lab.frames[1:]:
        fleet.apply(frame)
    assert list(ledger.recent) == lab.frames[-3:]
    assert ledger.recent_bytes == ledger.max_recent_bytes


def test_batches_from_longer_ago_than_is_kept_go_whatever_an_engines_clock_does() -> None:
    lab, fleet = busy(A, 8), Fleet()
    first, *rest = (frame for frame in lab.frames if isinstance(frame, Batch))
    fleet.max_recent_ns = rest[-1].wall_ns - rest[-3].wall_ns
    ledger = fleet.apply(first)
    for frame in rest:
        fleet.apply(frame)
    assert list(ledger.recent) == rest[-3:]
    assert ledger.recent_bytes == sum(map(batch_bytes, rest[-3:]))
    sequence, hour_ns = rest[-1].sequence, 3_600_000_000_000
    for number in range(1, 4):
        earlier = {"sequence": sequence + number, "wall_ns": rest[-1].wall_ns - hour_ns + number}
        fleet.apply(
            msgspec.structs.replace(
                rest[-1], **earlier, runs=memoryview(b""), args=memoryview(b""), ids=memoryview(b"")
            )
        )
    assert [batch.sequence for batch in ledger.recent][-3:] == [sequence + 1, sequence + 2, sequence + 3]


def test_a_floor_is_noted_when_an_engine_drains_and_not_while_it_works() -> None:
    lab, fleet = Lab(engine=A), Fleet()
    ledger = fleet.apply(lab.frames[0])
    at_the_start = ledger.floors.seen
    for floors in (1, 2):
        lab.arrive(8, max_tokens=5)
        while lab.scheduler.has_work:
            assert len(ledger.floors.seen) == len(at_the_start) + floors - 1
            lab.step(2.0)
            fleet.apply(lab.frames[-1])
        for _ in range(3):
            lab.step(2.0)
            fleet.apply(lab.frames[-1])
        assert len(ledger.floors.seen) == len(at_the_start) + floors
