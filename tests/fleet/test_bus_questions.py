"""Questions over a real nats-server: answers in parts, and every bound on them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext

from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import BadQuestion, ContractError, Unreachable
from kvscope.monitor.fleet.agent_answers import AgentAnswers, Extra
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_questions import ANSWER_PART_BYTES, QuestionMessage, decode_bus_question
from kvscope.monitor.fleet.bus_subjects import question_subject
from kvscope.monitor.fleet.bus_thread import BusThread
from kvscope.monitor.fleet.fleet_link import FleetLink
from kvscope.monitor.questions.pipeline import Pipeline
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up, with_client
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


class Answering(BusThread):
    """An agent that answers and does nothing else."""

    def __init__(self, config: BusConfig, extras: dict[str, Extra]) -> None:
        super().__init__(config, "answering")
        self.answers = AgentAnswers(config, Pipeline(), extras)

    async def work(self, streams: JetStreamContext) -> None:
        assert self._client is not None
        await self.answers.serve(self._client)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with one_server(tmp_path_factory.mktemp("nats")) as started:
        set_up(bus_config_of([started]))
        yield started


@contextmanager
def asking(server: NatsServer, extras: dict[str, Extra]) -> Iterator[FleetLink]:
    agent, hub = Answering(bus_config_of([server], "agent"), extras), FleetLink(bus_config_of([server], "hub"))
    hub.owners.see("agent", time.monotonic() + 3_600)  # it wrote just now
    agent.start()
    hub.start()
    try:
        until(lambda: agent.is_connected and hub.is_connected, "both are connected")
        until(lambda: not refused(hub), "the agent listens")
        yield hub
    finally:
        hub.stop()
        agent.stop()
        agent.answers.close()
        agent.answers._threads.shutdown()


def refused(hub: FleetLink) -> bool:
    try:
        hub.ask("agent", "engines", {}, 5.0)
    except Unreachable:
        return True
    return False


def test_a_long_answer_comes_in_parts_and_whole(server: NatsServer) -> None:
    text = "".join(f"{number:08}" for number in range(400_000))

    def long(arguments: dict[str, Any], timeout_s: float) -> bytes:
        assert 0 < timeout_s <= 20
        return msgspec.json.encode([text[: arguments["bytes"]]])

    with asking(server, {"long": long}) as hub:
        for size in (0, 1, ANSWER_PART_BYTES - 4, ANSWER_PART_BYTES - 3, len(text)):
            assert msgspec.json.decode(hub.ask("agent", "long", {"bytes": size}, 20.0)) == [text[:size]]
        assert hub._held_bytes == 0


def test_what_is_too_long_too_late_or_not_known_is_refused_with_its_reason(server: NatsServer) -> None:
    held = threading.Event()
    extras: dict[str, Extra] = {
        "huge": lambda _arguments, _timeout_s: bytes(limits.BUS_ANSWER_BYTES + 1),
        "broken": lambda _arguments, _timeout_s: bytes(1 // 0),
        "slow": lambda _arguments, _timeout_s: bytes(held.wait(30)),
    }
    with asking(server, extras) as hub:
        with pytest.raises(Unreachable, match="ask for a shorter window"):
            hub.ask("agent", "huge", {}, 10.0)
        with pytest.raises(Unreachable, match="see its log for the reason"):
            hub.ask("agent", "broken", {}, 10.0)
        with pytest.raises(BadQuestion, match="does not know the question of-tomorrow: it runs another release"):
            hub.ask("agent", "of-tomorrow", {}, 10.0)
        with pytest.raises(BadQuestion, match="engine"):
            hub.ask("agent", "block_map", {}, 10.0)
        with pytest.raises(Unreachable, match=r"did not answer within 0\.3 s"):
            hub.ask("agent", "slow", {}, 0.3)
        with pytest.raises(Unreachable, match="agent nowhere does not answer: it is not connected to NATS"):
            hub.ask("nowhere", "engines", {}, 10.0)
        assert hub.silence_of("nowhere")
        held.set()
        assert not refused(hub)
        assert hub.silence_of("agent") == ""


def test_an_agent_with_too_many_questions_refuses_further_ones_at_once(server: NatsServer) -> None:
    held = threading.Event()
    extras: dict[str, Extra] = {"slow": lambda _arguments, _timeout_s: str(held.wait(30)).lower().encode()}
    with asking(server, extras) as hub, ThreadPoolExecutor(limits.BUS_AGENT_QUESTIONS) as threads:
        waiting = [threads.submit(hub.ask, "agent", "slow", {}, 25.0) for _ in range(limits.BUS_AGENT_QUESTIONS)]
        until(lambda: hub._open_questions == limits.BUS_AGENT_QUESTIONS, "all are asked")
        with pytest.raises(Unreachable, match="has 64 questions to answer"):
            hub.ask("agent", "engines", {}, 25.0)
        held.set()
        assert {bytes(each.result()) for each in waiting} == {b"true"}


def test_an_answer_goes_to_a_reader_of_the_tenant_and_nowhere_else(server: NatsServer) -> None:
    asked = msgspec.json.encode(QuestionMessage(hub="h", question="engines", arguments={}, timeout_s=5))

    async def ask_for_elsewhere(streams: JetStreamContext) -> int:
        client: Client = streams._nc
        received = await client.subscribe("kvscope.v1.default.point.>")
        subject = question_subject("default", "agent")
        await client.publish(subject, asked, reply="kvscope.v1.default.point.agent.forged")
        try:
            await received.next_msg(timeout=0.5)
        except NatsTimeout:
            return 0
        return 1

    with asking(server, {}) as hub:
        assert with_client(bus_config_of([server]), ask_for_elsewhere) == 0
        assert not refused(hub)


def test_a_newer_question_and_no_question_are_refused() -> None:
    asked = msgspec.json.encode(QuestionMessage(hub="h", question="engines", arguments={}, timeout_s=5))
    assert decode_bus_question(asked).question == "engines"
    with pytest.raises(ContractError, match="of version 2"):
        decode_bus_question(asked.replace(b'"major":1', b'"major":2'))
    with pytest.raises(ContractError, match="not a question"):
        decode_bus_question(b"{")


def test_connections_of_a_link_that_is_stopped_end(server: NatsServer) -> None:
    for _ in range(5):
        link = FleetLink(bus_config_of([server], "hub"))
        link.start()
        until(lambda link=link: link.is_complete, "the streams are read")  # type: ignore[misc]
        link.stop()
        assert not link._thread.is_running
