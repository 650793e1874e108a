"""A reader that is behind: what waits unread takes bounded memory, nothing of it is lost, and a reader that was paused
itself reports no engine as silent.
"""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base import limits
from kvscope.monitor.contract.wire import ADDED_BY_SOURCE, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.service.memory_budget import UNREAD_BYTES, resident_bytes
from kvscope.monitor.sources.live_stream import LISTEN_NS, LiveStream
from tests.probes.published import ENGINE, published
from tests.waiting import PATIENCE_S

SENT = 1_500
OTHER_BYTES = 2 << 20
"""Of the publisher's own queue, which this test's process holds too, and of whatever else grows meanwhile."""


def test_unread_batches_take_no_more_than_the_memory_budget_plans_for(tmp_path: Path) -> None:
    """libzmq receives each batch into 8 KiB, however small it is."""
    lab = Lab()
    while len(lab.frames) < SENT:
        lab.arrive(20)
        lab.step(0.1)
    payloads = [encode(frame) for frame in lab.frames[:SENT]]
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    publisher.setsockopt(zmq.SNDHWM, limits.SUBSCRIBER_MESSAGES)
    publisher.bind(f"ipc://{tmp_path}/events")
    stream = LiveStream(f"ipc://{tmp_path}/events")
    try:
        while stream.bad_frames == 0:  # both ends are connected once something comes through
            publisher.send(b"\x00")
            stream.receive(0.05)
        before = resident_bytes()
        for payload in payloads:
            publisher.send(payload)
            time.sleep(0.001)
        grown = resident_bytes() - before
        assert grown < UNREAD_BYTES + OTHER_BYTES
    finally:
        stream.close()
        context.destroy(linger=0)


def test_a_reader_that_was_behind_gets_every_batch_from_the_engines_ring(tmp_path: Path) -> None:
    lab = Lab(total=120, clock=time, pack=False)
    with published(lab, tmp_path) as publisher:
        stream, ledger = LiveStream(publisher.events_endpoint, publisher.replay_endpoint), EngineLedger(ENGINE)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not stream.in_step:
                for received in stream.receive(0.02):
                    ledger.apply(received.frame)
            behind = publisher.packer.next_sequence + 2 * (limits.UNREAD_MESSAGES + limits.SUBSCRIBER_MESSAGES)
            while publisher.packer.next_sequence < behind:
                assert time.monotonic() < deadline, publisher.packer.next_sequence
                lab.arrive(20)
                lab.step()
                time.sleep(0.005)
            while ledger.sequence < behind - 1 or not stream.in_step:
                assert time.monotonic() < deadline, (ledger.sequence, behind, ledger.losses)
                for received in stream.receive(0.02):
                    ledger.apply(received.frame)
            assert not ledger.losses
            assert stream.filled_from.get("ring", 0) > 0
        finally:
            stream.close()


class ShiftedClock:
    """The system's clocks, both set forward by `shift_ns`, as a process finds them that was stopped for so long."""

    shift_ns = 0

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.shift_ns

    def time_ns(self) -> int:
        return time.time_ns() + self.shift_ns


def observes(stream: LiveStream) -> bool:
    """Whether one turn of the stream adds the time until which the engine was silent."""
    return any(received.frame.sequence == ADDED_BY_SOURCE for received in stream.receive(0.01))


def test_a_pause_of_the_reader_is_no_silence_of_the_engine(tmp_path: Path) -> None:
    """What was sent during the pause may come a moment later. Silence that lasts is still observed."""
    lab = Lab(total=60, clock=time, pack=False)
    clock = ShiftedClock()
    with published(lab, tmp_path) as publisher:
        stream = LiveStream(publisher.events_endpoint, publisher.replay_endpoint, clock)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not (observes(stream) and stream.in_step):
                assert time.monotonic() < deadline
            publisher.close()  # it is silent from here on
            while not observes(stream):
                assert time.monotonic() < deadline
            clock.shift_ns = 30_000_000_000
            paused_s = time.monotonic()
            while not observes(stream):
                assert time.monotonic() < deadline
            assert time.monotonic() - paused_s >= LISTEN_NS / 1e9
        finally:
            stream.close()
