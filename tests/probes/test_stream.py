"""Over real sockets: a reader that joins late, one that loses any batch, one whose engine is killed and restarted.

Each reaches the exact state, or says what it cannot know.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.contract import journal
from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.wire import Batch, NewerVersion, decode, encode
from kvscope.monitor.detectors.blind.stream_gap import StreamGap
from kvscope.monitor.detectors.detector import Settings
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.ledger.records import StreamPositions
from kvscope.monitor.probes.packer import Packer
from kvscope.monitor.probes.publisher import NotPrivate, Publisher, replay_endpoint_for, require_private
from kvscope.monitor.probes.replay_server import AskKeyframe, AskSince, Replay, ReplayQuestion, encode_question
from kvscope.monitor.sources.live_stream import LiveStream
from kvscope.monitor.sources.recording import Recording
from tests.probes.published import ENGINE, published, run
from tests.state_dump import FIELDS, comparable
from tests.waiting import PATIENCE_S

HEARTBEAT, AUDIT_CYCLES, AUDITED_NS, PLACES = (
    FIELDS.index(name) for name in ("heartbeat", "audit_cycles", "audited_ns", "places")
)
AUDITED = StreamPositions.__struct_fields__.index("audited")


@contextmanager
def reading(events: str, replay: str) -> Iterator[tuple[LiveStream, EngineLedger]]:
    stream = LiveStream(events, replay)
    try:
        yield stream, EngineLedger(ENGINE)
    finally:
        stream.close()


def read_until(
    stream: LiveStream, ledger: EngineLedger, done: Callable[[], bool], timeout_s: float = PATIENCE_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not done after {timeout_s} s: at {ledger.position()}, {ledger.losses}"
        for received in stream.receive(0.02):
            ledger.apply(received.frame)


def same_state(ledger: EngineLedger, packer: Packer) -> bool:
    """All is drained, and everything that a keyframe holds is equal, but for heartbeats, which never stop coming.

    Nor does an audit count that was under way at the keyframe a reader joined by: only the engine saw its beginning.
    """
    if packer.log.flushed or ledger.sequence < packer.next_sequence - 3 or not ledger.ready:
        return False
    ours, theirs = comparable(ledger.state), comparable(packer.shadow)
    missed_audits = theirs[AUDIT_CYCLES] - ours[AUDIT_CYCLES]
    for dump in (ours, theirs):
        dump[HEARTBEAT] = None
        if missed_audits == 1:
            dump[AUDIT_CYCLES] = dump[AUDITED_NS] = dump[PLACES][AUDITED] = None
    return bool(ours == theirs)


def test_a_reader_that_joins_late_has_the_exact_state(tmp_path: Path) -> None:
    lab = Lab(total=120, connector_share=0.5, clock=time, pack=False)
    with published(lab, tmp_path) as publisher:
        run(lab, 300)
        with reading(publisher.events_endpoint, publisher.replay_endpoint) as (stream, ledger):
            read_until(stream, ledger, lambda: stream.in_step)
            run(lab, 100, seed=1)
            read_until(stream, ledger, lambda: same_state(ledger, publisher.packer))
            assert not ledger.losses
            assert not ledger.anomalies
            assert ledger.state.counts_match(*lab.pool.counts()[:3])


class Forwarder(threading.Thread):
    """A subscriber that passes messages on, except for the batches in `drop`: a network that loses them."""

    def __init__(self, source: str, target: str, drop: set[int]) -> None:
        super().__init__(daemon=True)
        self.drop = drop
        self.dropped: set[int] = set()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.SUBSCRIBE, b"")
        self._sub.connect(source)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(target)

    def run(self) -> None:
        while not self._stopping.is_set():
            if self._sub.poll(20):
                parts = self._sub.recv_multipart()
                frame = decode(parts[-1])
                if isinstance(frame, Batch) and frame.sequence in self.drop:
                    self.dropped.add(frame.sequence)
                    continue
                self._pub.send_multipart(parts)

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        self._context.destroy(linger=0)


@pytest.mark.parametrize("kept_in", ["ring", "journal", "nowhere"])
def test_a_reader_that_loses_any_batch(tmp_path: Path, kept_in: str) -> None:
    """Every fifth batch is lost, single ones, pairs, and at the end: filled, or named as lost and put right."""
    lab = Lab(total=120, connector_share=0.5, clock=time, pack=False)
    settings: dict[str, object] = {
        "ring": {},
        "journal": {"journal_dir": tmp_path / "journal", "ring_bytes": 1},
        "nowhere": {"ring_bytes": 1, "replay_keyframe_s": 0.0},
    }[kept_in]
    with published(lab, tmp_path, **settings) as publisher:
        drop = {n for n in range(10_000) if n % 5 == 3 or n % 35 == 4}
        forwarder = Forwarder(publisher.events_endpoint, f"ipc://{tmp_path}/forwarded", drop)
        forwarder.start()
        try:
            with reading(f"ipc://{tmp_path}/forwarded", publisher.replay_endpoint) as (stream, ledger):
                read_until(stream, ledger, lambda: stream.in_step)
                for chunk in range(60):
                    run(lab, 3, seed=chunk)
                    while lab.log.flushed:
                        time.sleep(0.001)
                    last = publisher.packer.next_sequence - 1
                    read_until(stream, ledger, lambda last=last: ledger.sequence >= last)  # type: ignore[misc]
                read_until(stream, ledger, lambda: same_state(ledger, publisher.packer))
                assert len(forwarder.dropped) > 10
                assert not ledger.anomalies
                found = list(StreamGap().detect(ledger, Settings()))
                if kept_in == "nowhere":
                    assert ledger.losses
                    assert found[0].code == "blind.stream-gap"
                    assert found[0].evidence[0].value == sum(loss.batches for loss in ledger.losses)
                else:
                    assert stream.filled_from[kept_in] >= len(forwarder.dropped) - 1
                    assert not ledger.losses
                    assert not found
        finally:
            forwarder.stop()


@pytest.mark.parametrize("settings", [{"connector_share": 0.5}, {"window": 6}], ids=["one group", "two groups"])
def test_batches_the_engine_itself_dropped_are_put_right_by_its_audits(settings: dict[str, Any]) -> None:
    """The drain thread sleeps while the engine runs: flushes are dropped, counted, and healed by the next audit."""
    lab = Lab(total=120, capacity=5, **settings)
    ledger = EngineLedger(ENGINE)
    for frame in lab.frames:
        ledger.apply(frame)
    lab._pack = False
    run(lab, 40)
    assert lab.log.dropped_batches == 35
    lab._pack = True
    seen = len(lab.frames)
    healed = False
    for step in range(200):
        run(lab, 1, seed=step)
        for frame in lab.frames[seen:]:
            ledger.apply(frame)
        seen = len(lab.frames)
        if not healed and not ledger.uncertain_since_ns and ledger.dropped_batches:
            healed = True
            assert step > 2  # a whole cycle of audit slices, not a guess
        if healed:
            assert list(ledger.state.refs[1:]) == lab.pool.refs[1:]
            assert ledger.state.counts_match(*lab.pool.counts()[:3])
            tables = {r.number: sorted(r.blocks) for r in ledger.state.requests.values() if r.blocks}
            assert tables == {n: sorted(lab.blocks_of(n)) for n in lab.manager.tables}
            assert ledger.balance().holds
            assert ledger.balance().unaccounted == 0
    assert healed
    assert ledger.dropped_events > 35
    assert not ledger.anomalies
    keyframe_reader = EngineLedger(ENGINE)
    keyframe_reader.apply(lab.keyframe())
    assert not keyframe_reader.uncertain_since_ns


def test_a_keyframe_cut_while_damaged_says_so() -> None:
    lab = Lab(total=60, capacity=2)
    lab._pack = False
    run(lab, 30)
    lab._pack = True
    lab.step()
    lab.step()
    keyframe = lab.keyframe()
    assert keyframe.damaged
    ledger = EngineLedger(ENGINE)
    ledger.apply(keyframe)
    assert ledger.uncertain_since_ns


@contextmanager
def lab_process(path: Path, seed: int) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "kvscope.lab.stepped_process",
            f"ipc://{path}/events",
            f"ipc://{path}/replay",
            f"{path}/journal",
            str(seed),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_an_engine_killed_and_restarted(tmp_path: Path) -> None:
    with reading(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as (stream, ledger):
        with lab_process(tmp_path, 1) as process:
            read_until(stream, ledger, lambda: stream.in_step and ledger.state.last_step > 50)
            first_epoch, last_heard = ledger.epoch, ledger.sequence
            process.send_signal(signal.SIGKILL)
            process.wait()
        # The journal of the killed process holds at least all that was published.
        killed = EngineLedger(ENGINE)
        for frame in Recording(tmp_path / "journal"):
            killed.apply(frame)
        assert killed.epoch == first_epoch
        assert killed.sequence >= last_heard
        assert killed.balance().holds
        assert not killed.anomalies
        with lab_process(tmp_path, 2):
            read_until(
                stream, ledger, lambda: ledger.epoch > first_epoch and stream.in_step and ledger.state.last_step > 50
            )
            assert ledger.restarts == 1
            assert not ledger.anomalies
            assert ledger.balance().holds
    epochs = {segment.epoch for segment in journal.journal_segments(tmp_path / "journal")}
    assert len(epochs) == 2


def test_a_frozen_engine_is_heard_no_more_and_time_goes_on(tmp_path: Path) -> None:
    with (
        reading(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay") as (stream, ledger),
        lab_process(tmp_path, 3) as process,
    ):
        read_until(stream, ledger, lambda: stream.in_step)
        process.send_signal(signal.SIGSTOP)
        received_before = ledger.last_received_ns
        read_until(stream, ledger, lambda: ledger.now_ns - ledger.last_received_ns > 1_500_000_000)
        process.send_signal(signal.SIGCONT)
        read_until(stream, ledger, lambda: ledger.last_received_ns > received_before + 1_500_000_000)


def ask(publisher: Publisher, question: ReplayQuestion) -> tuple[Replay, list[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(publisher.replay_endpoint)
        dealer.send(encode_question(question))
        assert dealer.poll(10_000)
        header, *frames = dealer.recv_multipart()
        return msgspec.msgpack.decode(header, type=Replay), frames


def test_the_replay_socket_says_where_its_answer_comes_from(tmp_path: Path) -> None:
    lab = Lab(total=60, clock=time, pack=False)
    with published(lab, tmp_path, journal_dir=tmp_path / "journal", ring_bytes=20_000, heartbeat_s=60) as publisher:
        for n in range(60):
            run(lab, 2, seed=n)
            while lab.log.flushed:
                time.sleep(0.001)
        epoch, next_sequence = publisher.packer.epoch, publisher.packer.next_sequence
        header, frames = ask(publisher, AskSince(epoch, next_sequence - 3))
        assert (header.source, header.first, header.last, header.more, len(frames)) == (
            "ring",
            next_sequence - 3,
            next_sequence - 1,
            False,
            3,
        )
        header, frames = ask(publisher, AskSince(epoch, 5))
        assert (header.source, header.first) == ("journal", 5)
        assert len(frames) == header.last - 4
        assert ask(publisher, AskSince(epoch - 1, 0))[0].source == "keyframe"
        assert ask(publisher, AskKeyframe())[0].source == "keyframe"


def test_a_newer_engine_is_refused_with_a_message(tmp_path: Path) -> None:
    context = zmq.Context()
    try:
        pub = context.socket(zmq.PUB)
        pub.bind(f"ipc://{tmp_path}/new")
        lab = Lab(total=9)
        payload = bytearray(encode(lab.frames[0]))
        payload[2] = 9
        stream = LiveStream(f"ipc://{tmp_path}/new")
        try:
            refused = None
            deadline = time.monotonic() + PATIENCE_S
            while refused is None and time.monotonic() < deadline:
                pub.send_multipart([b"lab", bytes(payload)])
                try:
                    stream.receive(0.02)
                except NewerVersion as error:
                    refused = str(error)
            assert refused is not None
            assert "version 9.0" in refused
        finally:
            stream.close()
    finally:
        context.destroy(linger=0)


def test_the_stream_binds_nothing_that_others_can_reach() -> None:
    for endpoint in ("tcp://0.0.0.0:5757", "tcp://*:5757", "tcp://192.168.1.2:5757", "udp://127.0.0.1:1"):
        with pytest.raises(NotPrivate, match=r"ipc://PATH"):
            require_private(endpoint)
    for endpoint in ("tcp://127.0.0.1:5757", "tcp://localhost:1", "tcp://[::1]:5757", "ipc:///run/kvscope/events"):
        require_private(endpoint)


def test_the_replay_socket_is_beside_the_stream() -> None:
    assert replay_endpoint_for("tcp://127.0.0.1:5757") == "tcp://127.0.0.1:5758"
    assert replay_endpoint_for("ipc:///run/x") == "ipc:///run/x-replay"


def test_emission_never_waits() -> None:
    """With nobody draining, a million events are dropped and counted, and none of it blocks."""
    log = EventLog(capacity=10)
    for n in range(1000):
        for _ in range(1000):
            log.first_token(n)
        log.flush(n, n, (0, 0, 0, 0))
    assert log.dropped_batches == 990
    assert log.dropped_events == 990_000
    assert len(log.flushed) == 10
