"""Reports of vLLM's front end: joined with the scheduler's requests, bounded, and silent where they come too late."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvscope.monitor.contract.event_log import EventLog
from kvscope.monitor.contract.kinds import Cause, Status
from kvscope.monitor.contract.wire import decode, encode
from kvscope.monitor.ledger.engine_ledger import EngineLedger
from kvscope.monitor.probes.packer import Packer, Vitals
from kvscope.monitor.probes.vllm import front_end_inbox
from kvscope.monitor.probes.vllm.front_end_hooks import FrontEndReporter
from kvscope.monitor.probes.vllm.front_end_inbox import (
    LATE_NS,
    STALE_S,
    FrontEndInbox,
    FrontEndKind,
    FrontEndMessage,
    front_end_endpoint,
    remove_stale_inboxes,
)
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("real_parts")

ENGINE = "tiny@127.0.0.1:5757/0"
NO_VITALS = Vitals(-1, 0, 0, 0, 0, 0, 0)


class Joined:
    """An inbox, the log of its engine, a front end that reports to it, and a ledger of what both reported."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory / 'inbox'}"
        self.log = EventLog(time)
        self.numbers: dict[str, int] = {}
        state = SimpleNamespace(numbers=self.numbers, is_taken=lambda _name, _request_id: False)
        self.inbox = FrontEndInbox(state, self.log, self.endpoint)  # type: ignore[arg-type]
        self.front_end = FrontEndReporter(lambda _rank: self.endpoint, lambda: None)
        self.packer = Packer(self.log, ENGINE, lambda: NO_VITALS)
        self.ledger = EngineLedger(ENGINE)
        self.log.started(100, 1, 16, "{}")
        self.log.flush(-1, -1, (99, 0, 0, 100))

    def arrive(self, request_id: str) -> None:
        """The request reaches the scheduler."""
        number = self.numbers[request_id] = self.inbox.number_of(request_id)
        self.log.arrived(number, request_id, 10, 10, 0, 1, 2)
        self.log.queued(number, Cause.NEW)
        self.log.flush(0, 0, (99, 0, 0, 100))

    def drain(self) -> None:
        """What the drain thread does each time."""
        self.inbox.check()
        for batch in self.packer.pack():
            self.ledger.apply(decode(encode(batch)))

    def drain_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline
            self.drain()

    def status(self, name: str) -> int | None:
        record = self.ledger.request(name)
        return None if record is None else record.status


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Joined]:
    both = Joined(tmp_path)
    yield both
    both.inbox.close()
    both.front_end.close()


def request(name: str, prompt_tokens: int = 7) -> SimpleNamespace:
    return SimpleNamespace(request_id=name, prompt_token_ids=[1] * prompt_tokens)


def test_a_request_that_arrives_later_keeps_the_number_under_which_it_was_received(joined: Joined) -> None:
    joined.front_end.received(request("r-1"))
    joined.drain_until(lambda: joined.status("r-1") == Status.RECEIVED)
    assert joined.inbox.pending == 1
    joined.arrive("r-1")
    joined.drain()
    record = joined.ledger.request("r-1")
    assert record is not None
    assert record.status == Status.WAITING
    assert 0 < record.received_ns <= record.arrived_ns
    assert (len(joined.ledger.state.requests), joined.inbox.pending) == (1, 0)


def test_a_request_that_has_arrived_is_not_received_again(joined: Joined) -> None:
    joined.arrive("r-1")
    joined.drain()
    joined.front_end.received(request("r-1"))
    joined.front_end.received(request("r-2"))
    joined.drain_until(lambda: joined.status("r-2") == Status.RECEIVED)
    assert joined.status("r-1") == Status.WAITING
    assert joined.inbox.pending == 1


def test_a_request_that_has_ended_is_not_received_when_its_report_comes_late(joined: Joined) -> None:
    joined.arrive("r-1")
    joined.drain()
    del joined.numbers["r-1"]
    joined.front_end.received(request("r-1"))
    joined.front_end.received(request("r-2"))
    joined.drain_until(lambda: joined.status("r-2") == Status.RECEIVED)
    assert joined.inbox.pending == 1


def test_a_bounded_number_of_arrivals_is_remembered(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three is not, so that its late report looks like one of a new request."""
    monkeypatch.setattr(front_end_inbox, "MAX_ARRIVALS", 2)
    for name in ("r-1", "r-2", "r-3"):
        joined.arrive(name)
    joined.drain()
    joined.numbers.clear()
    for name in ("r-3", "r-2", "r-1"):
        joined.front_end.received(request(name))
    joined.drain_until(lambda: joined.inbox.pending)
    assert joined.inbox.pending == 1


def test_a_bounded_number_of_requests_is_expected(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end_inbox, "MAX_PENDING", 2)
    for name in ("r-1", "r-2", "r-3"):
        joined.front_end.received(request(name))
    joined.drain_until(lambda: joined.inbox.dropped)
    assert (joined.inbox.pending, joined.inbox.dropped) == (2, 1)


def test_a_session_that_goes_on_is_received_once(joined: Joined) -> None:
    joined.front_end.received(request("r-1", prompt_tokens=7))
    joined.front_end.received(request("r-1", prompt_tokens=9))
    joined.front_end.received(request("r-2"))
    joined.drain_until(lambda: joined.status("r-2") == Status.RECEIVED)
    record = joined.ledger.request("r-1")
    assert record is not None
    assert record.prompt_tokens == 7


@pytest.mark.parametrize("end", ["gone", "ended"])
def test_a_request_that_ends_before_it_arrives_leaves_the_ledger(joined: Joined, end: str) -> None:
    joined.front_end.received(request("r-1"))
    joined.drain_until(lambda: joined.inbox.pending)
    if end == "gone":
        joined.front_end.gone(["r-1"])
    else:
        joined.front_end.ended("r-1")
    joined.drain_until(lambda: not joined.inbox.pending)
    assert not joined.ledger.state.requests
    assert joined.ledger.state.totals.client_gone == (end == "gone")


def test_a_request_that_arrives_and_ends_during_a_check_has_arrived(
    joined: Joined, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined.front_end.received(request("r-1"))
    joined.drain_until(lambda: joined.inbox.pending)
    joined.front_end.ended("r-1")
    take = joined.inbox._take

    def arrive_first(*message: Any) -> None:
        joined.arrive("r-1")
        take(*message)

    monkeypatch.setattr(joined.inbox, "_take", arrive_first)
    joined.drain_until(lambda: not joined.inbox.pending)
    joined.drain()
    assert joined.status("r-1") == Status.WAITING
    assert not joined.ledger.state.totals.finished


def test_a_client_that_leaves_a_request_of_the_scheduler_is_reported(joined: Joined) -> None:
    joined.front_end.received(request("r-1"))
    joined.arrive("r-1")
    joined.drain()
    joined.front_end.gone(["r-1"])
    joined.drain_until(lambda: joined.ledger.state.totals.client_gone)
    record = joined.ledger.request("r-1")
    assert record is not None
    assert record.client_gone_ns
    assert not record.is_finished  # the engine reports its end


def test_a_client_of_a_request_that_is_not_known_leaves_none_of_the_others(joined: Joined) -> None:
    joined.arrive("r-1")
    joined.drain()
    other = FrontEndMessage(FrontEndKind.CLIENT_GONE, "r-0", time.monotonic_ns())
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(joined.endpoint)
        push.send(msgspec.msgpack.encode(other))
        push.send(b"\xc1")  # which comes after it
        joined.drain_until(lambda: joined.inbox.dropped)
    assert not joined.ledger.state.totals.client_gone


def test_messages_that_are_late_or_no_messages_are_counted_and_dropped(joined: Joined) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.connect(joined.endpoint)
        push.send(b"\xc1")
        push.send(msgspec.msgpack.encode([9, "r-1", 0]))
        late = FrontEndMessage(FrontEndKind.RECEIVED, "r-1", time.monotonic_ns() - 2 * LATE_NS)
        push.send(msgspec.msgpack.encode(late))
        joined.drain_until(lambda: joined.inbox.dropped == 3)
    assert not joined.ledger.state.requests


def test_a_front_end_of_several_ranks_reports_to_the_rank_it_chose(tmp_path: Path) -> None:
    asked: list[int] = []

    def endpoint_of(rank: int) -> str:
        asked.append(rank)
        return ""

    front_end = FrontEndReporter(endpoint_of, lambda: None)
    front_end.connected(SimpleNamespace(core_engines=[b"\0\0", b"\1\0"]))
    front_end.received(request("r-1"))
    assert not asked
    front_end.routed(b"\1\0", request("r-1"))
    front_end.gone(["r-1"])
    assert asked == [1]


def test_the_front_end_of_many_ranks_has_one_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread."""
    made: list[zmq.Context[zmq.Socket[bytes]]] = []
    kind = zmq.Context

    def context() -> zmq.Context[zmq.Socket[bytes]]:
        made.append(kind())
        return made[-1]

    front_end = FrontEndReporter(lambda rank: f"ipc://{tmp_path / str(rank)}", lambda: None)
    front_end.connected(SimpleNamespace(core_engines=[b"\0\0", b"\1\0"]))
    monkeypatch.setattr(zmq, "Context", context)
    for rank in (b"\0\0", b"\1\0"):
        front_end.routed(rank, request(f"r-{rank[0]}"))
    front_end.close()
    assert [one.closed for one in made] == [True]


def test_a_front_end_never_waits_for_an_engine_that_does_not_read(tmp_path: Path) -> None:
    front_end = FrontEndReporter(lambda _rank: f"ipc://{tmp_path / 'absent'}", lambda: None)
    for number in range(5_000):
        front_end.received(request(f"r-{number}"))
    front_end.close()


def test_each_engine_has_a_place_of_its_own_for_reports() -> None:
    places = {front_end_endpoint(f"tcp://127.0.0.1:{port}") for port in (5757, 5759)}
    assert len(places) == 2
    assert front_end_endpoint("tcp://127.0.0.1:*") == ""


def test_sockets_of_killed_engines_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, another, living = (tmp_path / f"kvscope-front-end-{name}-{os.getuid()}" for name in ("killed", "b", "c"))
    for path in (killed, another):  # as a killed process leaves them: bound, and without a listener
        with socket.socket(socket.AF_UNIX) as abandoned:
            abandoned.bind(str(path))
    of_others = tmp_path / f"kvscope-front-end-d-{os.getuid() + 1}"
    killed_too = another.rename(of_others)
    no_socket = tmp_path / f"kvscope-front-end-e-{os.getuid()}"
    no_socket.touch()
    state = SimpleNamespace(numbers={}, is_taken=lambda _name, _request_id: False)
    inbox = FrontEndInbox(state, EventLog(time), f"ipc://{living}")  # type: ignore[arg-type]
    assert remove_stale_inboxes() == []  # one that starts just now may not listen yet
    os.utime(killed, (1_000, 1_000))
    assert remove_stale_inboxes(1_000 + STALE_S) == []
    assert remove_stale_inboxes(1_000 + STALE_S + 1) == [killed]
    assert remove_stale_inboxes(time.time() + 2 * STALE_S) == []
    assert all(path.exists() for path in (killed_too, no_socket, living))
    inbox.close()
