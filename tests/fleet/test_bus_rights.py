"""What one agent's credentials cannot do to another agent, the hubs and the streams, over a real nats-server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.errors import TimeoutError as NatsTimeout
from nats.js import JetStreamContext, api

from kvscope.monitor.base.errors import KvscopeError
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_link import BusLink
from kvscope.monitor.fleet.bus_messages import encode_message
from kvscope.monitor.fleet.bus_questions import LAST_HEADER, OUTCOME_HEADER, PART_HEADER, QuestionMessage
from kvscope.monitor.fleet.bus_spool import BusSpool
from kvscope.monitor.fleet.bus_subjects import (
    BusRole,
    answer_prefix,
    events_stream,
    hubs_bucket,
    leases_bucket,
    points_stream,
    question_subject,
    stream_of_bucket,
)
from kvscope.monitor.fleet.fleet_owners import owner_key
from kvscope.monitor.fleet.hub_lease import ALERTS_KEY, HubRecord
from kvscope.monitor.fleet.lease_table import AgentRecord, LeaseRecord, agent_key, lease_key
from kvscope.monitor.fleet.open_findings import left_behind
from kvscope.monitor.questions.pipeline import Pipeline
from kvscope.monitor.service.hub_server import Hub
from tests.finding_transitions import ENGINE, AlertMessages
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up, with_client
from tests.fleet.stored import publish, subject_about
from tests.fleet.test_fleet_fold import fired, point_of, resolved
from tests.fleet.test_nats_streams import seed_file, user
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)
TENANT = "default"
USERS: tuple[tuple[str, BusRole], ...] = (
    ("victim", "agent"),
    ("thief", "agent"),
    ("sharing", "agent"),
    ("hub-1", "hub"),
    ("setup", "setup"),
    ("admin", "setup"),
)


class Guarded:
    """A nats-server that lets each name do what `monitor bus permissions` prints for it."""

    def __init__(self, server: NatsServer, seeds: dict[str, Path]) -> None:
        self._server = server
        self._seeds = seeds

    def config(self, name: str) -> BusConfig:
        role = dict(USERS)[name]
        return bus_config_of([self._server], name, tenant=TENANT, role=role, credentials=self._seeds[name])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("rights")
    seeds, users = {}, []
    for name, role in USERS:
        seeds[name], public = seed_file(folder, name)
        allowed = user(public, TENANT, role, name, share=name == "sharing")
        users.append(allowed if name != "admin" else json.dumps({"nkey": public}))
    with one_server(folder / "nats", f"authorization {{ users: [{', '.join(users)}] }}") as server:
        made = Guarded(server, seeds)
        set_up(made.config("setup"))
        yield made


FOUND = fired("victim")


def attempted(config: BusConfig, calls: dict[str, Callable[[JetStreamContext], Awaitable[Any]]]) -> list[str]:
    """Which of these NATS carried out for the credentials."""

    async def attempt(streams: JetStreamContext) -> list[str]:
        streams._timeout = streams._jsm._timeout = 0.4
        done = []
        for name, call in calls.items():
            try:
                await call(streams)
                done.append(name)
            except (Error, NatsTimeout):
                pass
        return done

    return with_client(config, attempt, timeout_s=90)


def put(subject: str, body: bytes, **headers: str) -> Callable[[JetStreamContext], Awaitable[Any]]:
    return lambda streams: streams.publish(subject, body, headers=headers or None)


def test_an_agent_writes_nothing_in_the_name_of_another_or_of_a_hub(guarded: Guarded) -> None:
    forged = [resolved(FOUND, "victim"), fired("victim", code="corrupt.double-free"), point_of("victim", running=9)]
    leases, hubs = leases_bucket(TENANT), hubs_bucket(TENANT)
    target = lease_key("", "tcp://10.0.0.1:5757")
    others = {
        **{subject_about(each): put(subject_about(each), encode_message(each)) for each in forged},
        "hub's lease": put(f"$KV.{hubs}.{ALERTS_KEY}", msgspec.json.encode(HubRecord("thief", "1"))),
        "owner": put(f"$KV.{hubs}.{owner_key(ENGINE)}", b"{}"),
        "heartbeat": put(f"$KV.{leases}.{agent_key('victim')}", msgspec.json.encode(AgentRecord("victim", "1", []))),
        "lease": put(f"$KV.{leases}.{target}", msgspec.json.encode(LeaseRecord("thief", "1", ["mine@127.0.0.1:1/0"]))),
        "question": put(question_subject(TENANT, "victim"), b"{}"),
        "answer": put(f"{answer_prefix(TENANT, 'victim')}.1", b"{}"),
    }
    for stream in (events_stream(TENANT), points_stream(TENANT), stream_of_bucket(hubs), stream_of_bucket(leases)):
        others |= {
            f"purge {stream}": lambda streams, name=stream: streams.purge_stream(name),
            f"delete {stream}": lambda streams, name=stream: streams.delete_stream(name),
            f"update {stream}": lambda streams, name=stream: streams.update_stream(
                api.StreamConfig(name=name, max_msgs=1)
            ),
            f"get {stream}": lambda streams, name=stream: streams.get_msg(name, 1, direct=True),
        }
    others["create"] = lambda streams: streams.add_stream(name="mine", subjects=["kvscope.v1.other.>"])
    others["read hubs"] = lambda streams: streams.stream_info(stream_of_bucket(hubs))
    assert attempted(guarded.config("thief"), others) == []
    own_point = point_of("thief", engine="mine@127.0.0.1:1/0")
    own = {
        "point": put(subject_about(own_point), encode_message(own_point)),
        "heartbeat": put(f"$KV.{leases}.{agent_key('thief')}", b"{}"),
        # It would remove every message of the bucket.
        "rollup": put(f"$KV.{leases}.{agent_key('thief')}", b"{}", **{"Nats-Rollup": "all"}),
    }
    assert attempted(guarded.config("thief"), own) == ["point", "heartbeat"]
    assert attempted(guarded.config("sharing"), {"lease": others["lease"]}) == ["lease"]


def test_an_agent_hears_no_question_answer_or_message_of_another(guarded: Guarded) -> None:
    victims = (
        question_subject(TENANT, "victim"),
        f"{answer_prefix(TENANT, 'victim')}.1",
        subject_about(point_of("victim", engine="heard@127.0.0.1:1/0")),
        f"$KV.{hubs_bucket(TENANT)}.probe",
        "_INBOX_kvscope.default.hub.1",
    )
    patterns = (*victims, "kvscope.>", f"kvscope.v1.{TENANT}.ask.>", f"kvscope.v1.{TENANT}.answer.>", "_INBOX.>", ">")

    async def listen(streams: JetStreamContext) -> set[str]:
        subscriptions = [await streams._nc.subscribe(pattern) for pattern in patterns]
        await streams._nc.flush()
        await asyncio.to_thread(with_client, guarded.config("admin"), say)
        await asyncio.sleep(0.3)
        return {subscription.subject for subscription in subscriptions if subscription.pending_msgs}

    async def say(streams: JetStreamContext) -> None:
        for subject in victims:
            await streams._nc.publish(subject, b"{}")
        await streams._nc.flush()

    assert with_client(guarded.config("thief"), listen) == set()
    assert with_client(guarded.config("admin"), listen) == {*patterns} - {"_INBOX.>"}


def test_what_a_stream_delivers_for_an_agent_is_nobodys_message(guarded: Guarded) -> None:
    """A request to JetStream names the subject of its answer, and NATS does not ask whether its sender may write
    there.
    """
    mine = point_of("thief", engine="mine@127.0.0.1:1/0")
    other, lease = subject_about(point_of("victim")), f"$KV.{hubs_bucket(TENANT)}.{ALERTS_KEY}"
    stream = points_stream(TENANT)

    async def redirect(streams: JetStreamContext) -> None:
        client: Client = streams._nc
        config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE)
        pulled = await streams.pull_subscribe(subject_about(mine), stream=stream, config=config)
        consumer = (await pulled.consumer_info()).name
        for to in (other, lease, f"{answer_prefix(TENANT, 'victim')}.1", question_subject(TENANT, "victim")):
            await streams.publish(subject_about(mine), encode_message(mine))
            await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", b"1", reply=to)
            await client.publish(f"$JS.API.DIRECT.GET.{stream}.{subject_about(mine)}", b"", reply=to)
        await client.flush()

    with_client(guarded.config("thief"), redirect)
    time.sleep(0.3)

    async def subjects(streams: JetStreamContext) -> dict[str, int]:
        found = {}
        for name in (stream, stream_of_bucket(hubs_bucket(TENANT))):
            found |= (await streams.stream_info(name, subjects_filter=">")).state.subjects or {}
        return found

    kept = with_client(guarded.config("hub-1"), subjects)
    assert subject_about(mine) in kept
    assert not {other, lease} & kept.keys()


def test_only_the_agent_that_was_asked_answers(guarded: Guarded) -> None:
    link = BusLink(guarded.config("victim"), Pipeline())
    link.start()
    try:
        with hub_of(guarded.config("hub-1")) as hub:
            until(lambda: link.is_connected, "a connection")
            until(lambda: answers(hub), "an answer")
            asked = msgspec.json.encode(QuestionMessage(hub="thief", question="engines", arguments={}, timeout_s=1))

            async def steal(streams: JetStreamContext) -> None:
                client: Client = streams._nc
                await client.publish(
                    question_subject(TENANT, "victim"), asked, reply="kvscope.v1.default.answer.thief.1"
                )
                last = {PART_HEADER: "0", LAST_HEADER: "1", OUTCOME_HEADER: "ok"}
                for number in range(100):
                    await client.publish(f"{answer_prefix(TENANT, 'victim')}.{number}", b"[]", headers=last)
                await client.flush()

            before = sum(link.figures().answered.values())
            with_client(guarded.config("thief"), steal)
            assert sum(link.figures().answered.values()) == before
            assert answers(hub)
    finally:
        link.stop()


def answers(hub: Hub) -> bool:
    try:
        return hub.link.ask("victim", "engines", {}, 2.0) == b"[]"
    except KvscopeError:
        return False


def test_with_its_credentials_a_thief_changes_nothing_at_the_hub_and_is_named(guarded: Guarded) -> None:
    """The engine is the victim's: of what the thief may publish, nothing counts, over restarts of the hub."""
    victim, thief = guarded.config("victim"), guarded.config("thief")
    for _ in range(2):
        with hub_of(guarded.config("hub-1")) as hub:
            publish(victim, [FOUND, point_of("victim", FOUND.transition.id, running=3)])
            until(lambda hub=hub: hub.query.engines("", ENGINE), "the engine")  # type: ignore[misc]
            forged = fired("thief", code="corrupt.double-free")
            publish(thief, [resolved(FOUND, "thief"), forged, point_of("thief", forged.transition.id, running=9)])
            until(lambda hub=hub: hub.query.findings(engine="agent thief"), "the thief is named")  # type: ignore[misc]
            (view,) = hub.query.engines("", ENGINE)
            assert view.running == 3
            assert [each.id for each in hub.query.findings("firing", ENGINE)] == [FOUND.transition.id]
            assert {each.agent for each in hub.query.fleet_overview().engines if each.engine == ENGINE} == {"victim"}
            (told,) = hub.query.findings("firing", "agent thief")
            assert told.code == "blind.name-clash"
            assert "agent victim owns" in told.explanation
            assert hub.query.finding(told.id).finding.id == told.id
            until(lambda hub=hub: not hub.link.owners.take_unwritten(), "the owner is kept")  # type: ignore[misc]
    own = with_client(
        victim, lambda streams: left_behind(streams, victim, ENGINE, "victim", BusSpool(None, TENANT, "victim"))
    )
    assert [each.id for each in own.findings] == [FOUND.transition.id]


def test_an_agent_under_another_name_than_its_credentials_says_what_is_missing(guarded: Guarded) -> None:
    link = BusLink(replace(guarded.config("thief"), agent="other"), Pipeline())
    link.start()
    try:
        link.put(AlertMessages().fire(1))
        until(lambda: "monitor bus permissions --agent other" in link.figures().error, "the remedy")
        assert link.spool.messages == 1
    finally:
        link.stop()
