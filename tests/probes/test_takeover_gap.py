"""A reader that takes an engine over: it has every batch since the one before it, once, and then the exact state."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract.kinds import Kind
from kvscope.monitor.contract.wire import Batch, Frame, Keyframe
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.service.source_reader import _from_state_on
from kvscope.monitor.sources.live_stream import LiveStream
from tests.probes.published import ENGINE, published, run
from tests.probes.test_stream import same_state
from tests.state_dump import FIELDS, comparable
from tests.waiting import PATIENCE_S


@contextmanager
def working(lab: Lab) -> Iterator[None]:
    """The lab goes on, with steps all the time."""
    stopping = threading.Event()

    def work() -> None:
        seed = 1
        while not stopping.is_set():
            run(lab, 2, seed)
            seed += 1
            time.sleep(0.002)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


class TakingOver:
    """A reader that knows the first batch that is kept nowhere, with its ledger and what came."""

    def __init__(self, publisher: Publisher, unkept: int) -> None:
        self.publisher = publisher
        self.stream = LiveStream(
            publisher.events_endpoint, publisher.replay_endpoint, unkept=lambda _engine, _epoch: unkept
        )
        self.ledger = EngineLedger(ENGINE)
        self.frames: list[Frame] = []

    def read(self) -> None:
        for frame in self.stream.poll(0.02):
            self.frames.append(frame)
            if not (isinstance(frame, Batch) and frame.sequence > 0 and self.ledger.epoch == 0):
                self.ledger.apply(frame)

    def read_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, self.standing()
            self.read()

    def standing(self) -> str:
        packer = self.publisher.packer
        fields = ("_next", "_is_held", "_lacks_state", "_more", "_unreadable", "_behind", "bad_frames")
        stream = {name: getattr(self.stream, name) for name in fields}
        states = comparable(self.ledger.state), comparable(packer.shadow)
        differ = [name for name, ours, theirs in zip(FIELDS, *states, strict=True) if ours != theirs]
        return (
            f"{stream}, engine at {packer.next_sequence}, ledger at {self.ledger.sequence} ({self.ledger.ready=}),"
            f" log flushed {packer.log.flushed}, state differs in fields {differ}"
        )

    def read_to_the_end(self) -> None:
        self.read_until(lambda: self.stream.in_step and same_state(self.ledger, self.publisher.packer))


@contextmanager
def closing_reader(publisher: Publisher, unkept: int) -> Iterator[TakingOver]:
    reader = TakingOver(publisher, unkept)
    try:
        yield reader
    finally:
        reader.stream.close()


def sequences(frames: list[Frame]) -> list[int]:
    return [frame.sequence for frame in frames if isinstance(frame, Batch) and frame.sequence >= 0]


@pytest.mark.parametrize("kept_in", ["ring", "journal"])
def test_every_batch_since_the_last_reader_comes_once_and_then_the_state(tmp_path: Path, kept_in: str) -> None:
    journal = {"ring_bytes": 1, "journal_dir": tmp_path / "journal"}
    settings: dict[str, object] = {} if kept_in == "ring" else {**journal}
    lab = Lab(total=120, connector_share=0.5, clock=time, pack=False)
    with published(lab, tmp_path, **settings) as publisher:
        run(lab, 300)
        time.sleep(0.3)
        with closing_reader(publisher, 7) as reader:
            with working(lab):
                reader.read_until(lambda: reader.stream.in_step)
            reader.read_to_the_end()
    frames, ledger = reader.frames, reader.ledger
    received = sequences(frames)
    assert received == list(range(7, received[-1] + 1))
    keyframes = [number for number, frame in enumerate(frames) if isinstance(frame, Keyframe)]
    assert len(keyframes) == 1
    before = frames[keyframes[0] - 1]
    assert before.sequence == frames[keyframes[0]].sequence  # it stands behind its own batch
    assert not ledger.losses
    assert not ledger.anomalies
    # All of it in one poll: what a ledger is fed begins at the keyframe, and nothing behind that is left out.
    assert list(_from_state_on(frames, {})) == frames[keyframes[0] :]
    since_begin = [each for each in frames if isinstance(each, Batch) and each.sequence > 0]
    begun = [msgspec.structs.replace(since_begin[0], sequence=0), *since_begin]
    assert list(_from_state_on(begun, {})) == begun


def test_what_the_engine_has_no_more_is_named_as_lost(tmp_path: Path) -> None:
    lab = Lab(total=120, connector_share=0.5, clock=time, pack=False)
    with published(lab, tmp_path, ring_bytes=1, replay_keyframe_s=0.0) as publisher:
        run(lab, 600)
        time.sleep(0.5)
        run(lab, 100)
        with closing_reader(publisher, 1) as reader:
            reader.read_to_the_end()
    batches = [frame for frame in reader.frames if isinstance(frame, Batch)]
    lost = [event for batch in batches for event in batch.events() if event.kind == Kind.LOST]
    assert [event.args[0] for event in lost] == [1]
    assert not reader.ledger.anomalies
