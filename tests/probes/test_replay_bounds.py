"""The replay socket under clients that flood it, do not read it, or send it what it does not know."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from kvscope.lab.stepped_engine import Lab
from kvscope.monitor.base import limits
from kvscope.monitor.contract.wire import Keyframe, decode
from kvscope.monitor.probes.publisher import Publisher
from kvscope.monitor.probes.replay_server import (
    AskKeyframe,
    AskSince,
    NotAQuestion,
    Replay,
    ReplayQuestion,
    decode_question,
    encode_question,
)
from tests.probes.published import published, run
from tests.waiting import PATIENCE_S, until


@contextmanager
def client(publisher: Publisher, **options: int) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        for option, value in options.items():
            dealer.setsockopt(getattr(zmq, option), value)
        dealer.connect(publisher.replay_endpoint)
        yield dealer
    finally:
        context.destroy(linger=0)


def answered(
    dealer: zmq.Socket[bytes], question: ReplayQuestion, timeout_s: float = PATIENCE_S
) -> tuple[Replay, list[bytes]]:
    """As a reader does: ask again after a second."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        dealer.send(encode_question(question))
        if dealer.poll(1_000):
            header, *frames = dealer.recv_multipart()
            return msgspec.msgpack.decode(header, type=Replay), frames
    raise AssertionError(f"no answer to {question} within {timeout_s} s")


@pytest.mark.slow
def test_a_client_that_asks_and_never_reads_is_made_few_keyframes(tmp_path: Path) -> None:
    """Another one is answered meanwhile, and the engine's batches go on."""
    lab = Lab(total=50_000, clock=time, pack=False)
    with published(lab, tmp_path, replay_keyframe_s=0.01) as publisher:
        made: list[int] = []
        cut = publisher.packer.keyframe
        publisher.packer.keyframe = lambda: (made.append(1), cut())[1]  # type: ignore[method-assign]
        run(lab, 20)
        with client(publisher, RCVHWM=1, SNDHWM=0) as greedy, client(publisher) as polite:
            for _ in range(6_000):
                greedy.send(encode_question(AskKeyframe()))
            dropped = publisher._replay.dropped
            until(lambda: dropped.total() > 1_000)
            so_far = len(made)
            assert so_far <= 64
            header, frames = answered(polite, AskKeyframe())
            assert header.source == "keyframe"
            assert isinstance(decode(frames[0]), Keyframe)
            until(lambda: dropped.total() > 5_000)
            assert len(made) <= so_far + 3  # of these the polite client's is one
            run(lab, 20)
            until(lambda: not lab.log.flushed)
            assert not lab.log.dropped_batches


def test_clients_of_one_second_share_a_keyframe_and_what_came_since(tmp_path: Path) -> None:
    lab = Lab(total=120, clock=time, pack=False)
    with published(lab, tmp_path, replay_keyframe_s=60.0, heartbeat_s=60.0) as publisher:
        run(lab, 20)
        until(lambda: not lab.log.flushed)
        with client(publisher) as first, client(publisher) as second:
            _, (keyframe, *later) = answered(first, AskKeyframe())
            assert not later
            run(lab, 20, seed=1)
            until(lambda: not lab.log.flushed)
            header, (again, *later) = answered(second, AskKeyframe())
            assert again == keyframe
            assert later
            assert header.last == publisher.packer.next_sequence - 1
            # It has that keyframe: asking again brings nothing, and asking for batches does.
            second.send(encode_question(AskKeyframe()))
            assert not second.poll(300)
            assert answered(second, AskSince(header.epoch, header.last))[0].source == "ring"


@pytest.mark.parametrize(
    "question",
    [
        b"",
        b"\x91" * 60,
        b"\x91" * 4_000,
        msgspec.msgpack.encode(["since"]),
        msgspec.msgpack.encode(["since", -1, 0]),
        msgspec.msgpack.encode(["since", 1 << 63, 0]),
        msgspec.msgpack.encode(["since", 1.0, 0]),
        msgspec.msgpack.encode(["since", "1", None]),
        msgspec.msgpack.encode(["nonsense"]),
        msgspec.msgpack.encode({"keyframe": 1}),
        msgspec.msgpack.encode(["keyframe", "x" * 100]),
        b"\xc1",
        b"\x92\xa5since",
        b"\xff\xfe",
    ],
)
def test_what_is_no_question_is_refused(question: bytes) -> None:
    with pytest.raises(NotAQuestion):
        decode_question(question)


def test_questions_come_back_as_they_were() -> None:
    for question in (AskKeyframe(), AskSince(1_700_000_000_000_000_000, 0), AskSince((1 << 63) - 1, (1 << 63) - 1)):
        packed = encode_question(question)
        assert len(packed) <= limits.QUESTION_BYTES
        assert decode_question(packed) == question


def test_damaged_questions_are_counted_and_others_answered(tmp_path: Path) -> None:
    lab = Lab(total=60, clock=time, pack=False)
    with published(lab, tmp_path) as publisher, client(publisher) as hostile, client(publisher) as polite:
        run(lab, 5)
        for _ in range(20):
            hostile.send(b"\x91" * 4_000)
        hostile.send_multipart([b"", b"", b"\xc1"])
        hostile.send(b"x" * 2 * limits.REQUEST_BYTES)  # disconnected for this
        until(lambda: publisher._replay.dropped["not a question"] >= 10)
        assert answered(polite, AskKeyframe())[0].source == "keyframe"


@pytest.mark.slow
def test_a_subscriber_that_does_not_read_has_few_messages_waiting(tmp_path: Path) -> None:
    lab = Lab(total=60, clock=time, pack=False)
    context = zmq.Context()
    with published(lab, tmp_path) as publisher:
        deaf = context.socket(zmq.SUB)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4_096)
        deaf.setsockopt(zmq.SUBSCRIBE, b"")
        deaf.connect(publisher.events_endpoint)
        deaf.poll(5_000)  # a heartbeat has come: it is connected
        sent = 3 * limits.SUBSCRIBER_MESSAGES
        for n in range(sent):
            lab.log.arrived(n, "x" * 200_000, 1, 1, 0, 1, 1)
            lab.log.flush(n, n, lab.pool.counts())
            until(lambda: not lab.log.flushed)
        received = small = 0
        while small < 20 and deaf.poll(5_000):  # heartbeats never stop coming
            large = len(deaf.recv_multipart()[1]) > 200_000
            received, small = received + large, 0 if large else small + 1
        assert 0 < received <= limits.SUBSCRIBER_MESSAGES + 10, "beside the queue, what the sockets' own buffers hold"
    context.destroy(linger=0)


COME_AND_GO = """
import sys, threading, time
from pathlib import Path
import zmq
from kvscope.lab.stepped_engine import Lab
from tests.probes.published import published

over = time.monotonic() + 4

def come_and_go(endpoint):
    while time.monotonic() < over:
        context = zmq.Context()
        reader = context.socket(zmq.SUB)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        reader.connect(endpoint)
        reader.poll(30)
        context.destroy(linger=0)

lab = Lab(total=60, clock=time, pack=False)
with published(lab, Path(sys.argv[1]), heartbeat_s=0.0, ring_bytes=250_000) as publisher:
    readers = [threading.Thread(target=come_and_go, args=(publisher.events_endpoint,)) for _ in range(3)]
    for reader in readers:
        reader.start()
    while time.monotonic() < over:
        for size in (1, 200_000):
            lab.log.arrived(1, "x" * size, 1, 1, 0, 1, 1)
            lab.log.flush(1, 1, lab.pool.counts())
            time.sleep(0.006)
    for reader in readers:
        reader.join()
"""


@pytest.mark.slow
def test_readers_that_come_and_go_do_not_end_the_engine(tmp_path: Path) -> None:
    """Messages grow and shrink meanwhile. libzmq crashes if its queue is made shorter as a subscriber goes."""
    ran = subprocess.run(
        [sys.executable, "-c", COME_AND_GO, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
