"""Over a real nats-server: each transition once, whatever is away, full or newer; a tenant sees its own and no more."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import nkeys
import pytest
from nats.errors import Error
from nats.js import JetStreamContext, api
from nats.js.errors import APIError

from kvscope.monitor.base.errors import CannotTell
from kvscope.monitor.fleet import bus_connection
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import SUBJECT_IN_FLIGHT, follow, publish_once, read_all
from kvscope.monitor.fleet.bus_link import BusLink
from kvscope.monitor.fleet.bus_messages import encode_message, finding_message
from kvscope.monitor.fleet.bus_subjects import BusRole, events_stream, permissions_of, subject_of, subjects_of
from kvscope.monitor.fleet.fleet_reader import FleetReader, read_fleet
from kvscope.monitor.questions.pipeline import Pipeline
from tests.detectors.scenes import finished_held
from tests.finding_transitions import ENGINE, AlertMessages
from tests.fleet.nats_servers import (
    NatsServer,
    bus_config_of,
    one_server,
    set_up,
    stored_findings,
    three_servers,
    with_client,
)
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with one_server(tmp_path_factory.mktemp("nats") / "one") as started:
        yield started


@pytest.mark.smoke
def test_points_and_transitions_arrive_once_and_a_reader_folds_them(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="once")
    set_up(config)
    scene = finished_held("leak.finished-held:limit=2")
    scene.live(15)
    transitions = scene.watch.take_transitions()
    link = BusLink(config, scene.watch)
    link.start()
    reader = FleetReader(config)
    reader.start()
    try:
        for _ in range(3):
            link.put(transitions)
        until(lambda: link.spool.messages == 0 and link.figures().published.get("point"), "all is sent")
        until(lambda: reader.is_complete and reader._fold.points, "the reader has read it")
        assert link.figures().error == ""
        with reader.fold() as fold:
            assert {each.id for each in fold.open_findings()} == {each.id for each in scene.watch.lifecycle.firing()}
            (engine,) = fold.engines().values()
        assert engine.point.engine.engine == scene.watch.engines()[0].engine
        assert engine.point.agent == "agent-1"
        assert engine.missing == []
    finally:
        link.stop()
        reader.stop()
    stored = stored_findings(config)
    assert sorted(each.id for each in stored) == sorted(finding_message(each, "").id for each in transitions)
    (told_once,) = read_fleet(config).engines().values()
    assert told_once.findings == engine.findings


def test_a_transition_that_is_sent_again_much_later_is_stored_once(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="again")
    set_up(config)
    (fired,) = AlertMessages().fire(1)
    message = finding_message(fired, "a")
    subject = subject_of("again", "finding", "a", ENGINE, message.id)

    async def send(streams: JetStreamContext) -> None:
        for number in range(3):  # another Nats-Msg-Id each time, as if its window were over
            await publish_once(streams, subject, encode_message(message), f"{message.id}-{number}", alone=True)

    with_client(config, send)
    assert [each.id for each in stored_findings(config)] == [message.id]


@pytest.mark.slow
def test_a_message_in_flight_is_not_taken_for_stored(tmp_path: Path) -> None:
    """A leader without followers has it, and may lose it: only what is stored counts as stored before."""
    with three_servers(tmp_path) as servers:
        config = bus_config_of(servers, tenant="flight")
        set_up(config, replicas=3)
        subject = subject_of(config.tenant, "finding", "a", ENGINE, "alone")

        async def leader_of(streams: JetStreamContext) -> str:
            info = await streams.stream_info(events_stream(config.tenant))
            assert info.cluster is not None
            return str(info.cluster.leader)

        (leader,) = (each for each in servers if each.folder.name == with_client(config, leader_of))

        async def publish_twice(streams: JetStreamContext) -> None:
            for each in servers:
                if each is not leader:
                    each.pause()
            first = asyncio.create_task(publish_once(streams, subject, b"{}", "one", alone=True))
            await asyncio.sleep(0.5)
            try:
                await publish_once(streams, subject, b"{}", "two", alone=True)
                assert first.done(), "taken for stored while it is in flight"
            except APIError as refused:
                if refused.err_code != SUBJECT_IN_FLIGHT:
                    raise
            finally:
                for each in servers:
                    each.resume()
                await asyncio.gather(first, return_exceptions=True)

        with_client(bus_config_of([leader], tenant="flight"), publish_twice)


def test_what_is_found_while_nats_is_away_arrives_later_and_is_shown_meanwhile(tmp_path: Path) -> None:
    received_alerts = AlertMessages()
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server])
        set_up(config)
        server.kill()
        link = BusLink(config, Pipeline(), tmp_path / "data" / "bus.sqlite")
        link.start()
        link.put(received_alerts.fire(1))
        time.sleep(0.5)
        figures = link.figures()
        assert not figures.connected
        assert figures.error
        assert figures.away_s > 0
        assert figures.spooled == 1
        link.stop()  # and a restart of the service keeps it
        link = BusLink(config, Pipeline(), tmp_path / "data" / "bus.sqlite")
        link.start()
        link.put(received_alerts.end(9))
        server.start()
        until(lambda: link.spool.messages == 0 and not link.figures().error, "all is sent")
        assert link.figures().connected
        link.stop()
        assert [each.transition.to for each in stored_findings(config)] == ["firing", "resolved"]


def test_a_full_stream_refuses_and_says_so_and_nothing_is_lost(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="full")
    set_up(config, most_bytes=40_000)
    link = BusLink(config, Pipeline())
    link.start()
    try:
        received_alerts = AlertMessages()
        fired = [each for n in range(60) for each in received_alerts.fire(1, key=str(n), explanation="e" * 500)]
        fired = [each for each in fired if each.to == "firing"]
        link.put(fired)
        until(lambda: "is full" in link.figures().error, "the full stream is shown")
        assert "monitor bus setup --bytes" in link.figures().error
        assert link.spool.messages > 0
        set_up(config, most_bytes=1_000_000)
        until(lambda: link.spool.messages == 0 and not link.figures().error, "the rest is sent")
    finally:
        link.stop()
    stored = [each.id for each in stored_findings(config)]
    assert sorted(stored) == sorted({finding_message(each, "").id for each in fired})


def test_without_streams_the_remedy_is_named_and_later_messages_arrive(server: NatsServer) -> None:
    config = bus_config_of([server], tenant="missing")
    with pytest.raises(CannotTell, match="monitor bus setup"):
        read_fleet(config)
    link = BusLink(config, Pipeline())
    link.start()
    try:
        link.put(AlertMessages().fire(1))
        until(lambda: "monitor bus setup" in link.figures().error, "the missing stream is shown")
        set_up(config)
        until(lambda: link.spool.messages == 0, "all is sent")
    finally:
        link.stop()
    assert len(stored_findings(config)) == 1


def test_nats_that_is_not_there_is_a_clear_error() -> None:
    with pytest.raises(CannotTell, match=r"127\.0\.0\.1:1 does not take the connection"):
        read_fleet(BusConfig(("nats://127.0.0.1:1",)))


# ---------------------------------------------------------------- tenants


def seed_file(folder: Path, name: str) -> tuple[Path, str]:
    """A file with an nkey's seed, and its public key."""
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    path = folder / f"{name}.nk"
    path.write_bytes(seed)
    return path, nkeys.from_seed(bytearray(seed)).public_key.decode()


def user(public: str, tenant: str, role: BusRole = "agent", agent: str = "agent-1", *, share: bool = False) -> str:
    """A user of nats-server's configuration with what `monitor bus permissions` prints."""
    allowed = permissions_of(tenant, role, agent, share=share)
    permissions = {verb: {"allow": subjects} for verb, subjects in allowed.items()}
    return json.dumps({"nkey": public, "permissions": permissions})


@pytest.mark.slow
def test_a_tenants_credentials_see_its_subjects_and_nothing_else(tmp_path: Path) -> None:
    tenants = ("team-a", "team-b")
    seeds: dict[tuple[str, BusRole], Path] = {}
    users = []
    for tenant in tenants:
        for role in ("agent", "reader", "setup"):
            seeds[tenant, role], public = seed_file(tmp_path, f"{tenant}-{role}")
            users.append(user(public, tenant, role))
    admin, admin_key = seed_file(tmp_path, "admin")
    users.append(f'{{ nkey: "{admin_key}" }}')
    with one_server(tmp_path / "nats", f"authorization {{ users: [{', '.join(users)}] }}") as server:

        def config(tenant: str, role: BusRole, of: str = "") -> BusConfig:
            return bus_config_of([server], tenant=tenant, role=role, credentials=seeds[of or tenant, role])

        for tenant in tenants:
            set_up(config(tenant, "setup"))
            link = BusLink(config(tenant, "agent"), Pipeline())
            link.start()
            link.put(AlertMessages().fire(1, engine=f"{tenant}-engine"))
            until(lambda link=link: link.spool.messages == 0, "all is sent")  # type: ignore[misc]
            link.stop()
            (seen,) = read_fleet(config(tenant, "reader")).open_findings()
            assert seen.judgement.engine == f"{tenant}-engine"
        for of, tenant in (("team-a", "team-b"), ("team-a", "team-c")):
            with pytest.raises(CannotTell):
                read_fleet(config(tenant, "reader", of))
        assert reached(config("team-a", "agent"), "team-b") == []
        assert_cannot_write(config("team-a", "reader"))
        with pytest.raises(CannotTell, match="--nats-creds"):
            read_fleet(bus_config_of([server], tenant="team-a"))
        everything = bus_config_of([server], tenant="team-b", credentials=admin)
        assert len(stored_findings(everything)) == 1
        assert {"info", "message", "direct", "names", "publish", ">"} <= set(reached(everything, "team-b"))


def reached(config: BusConfig, other: str) -> list[str]:
    """What can be had of another tenant over subscriptions, the API of JetStream, and streams of one's own making."""

    async def attempt(streams: JetStreamContext) -> list[str]:
        found = []
        client = streams._nc
        for subject in (*subjects_of(other, "point", "finding"), ">", "$JS.API.>", "_INBOX.>", f"$KV.{other}.>"):
            subscription = await client.subscribe(subject)
            await publish_once(
                streams,
                subject_of(config.tenant, "point", config.agent, "x"),
                b"{}",
                f"probe-{subject}",
                alone=False,
            )
            try:
                await subscription.next_msg(timeout=0.1)
                found.append(subject)
            except Error:
                pass
        stream = events_stream(other)
        for name, call in {
            "info": streams.stream_info(stream),
            "message": streams.get_msg(stream, 1),
            "direct": streams.get_msg(stream, 1, direct=True),
            "create": streams.add_stream(name="mine", subjects=[f"kvscope.v1.{other}.extra.>"]),
            "source": streams.add_stream(name="copy", mirror=api.StreamSource(name=stream)),
            "names": streams.streams_info(),
            "publish": streams.publish(subject_of(other, "point", config.agent, "x"), b"{}"),
            "purge": streams.purge_stream(stream),
            "delete": streams.delete_stream(stream),
        }.items():
            try:
                await call
                found.append(name)
            except Error:
                pass
        return found

    async def run(streams: JetStreamContext) -> list[str]:
        streams._timeout = streams._jsm._timeout = 0.3
        return await attempt(streams)

    return with_client(config, run)


def assert_cannot_write(config: BusConfig) -> None:
    """Credentials that only read publish nothing, and hold no lease."""

    async def attempt(streams: JetStreamContext) -> list[str]:
        written = []
        for subject in (
            subject_of(config.tenant, "point", config.agent, "x"),
            f"$KV.kvscope-{config.tenant}-leases.engine.x",
        ):
            try:
                await streams.publish(subject, b"{}", timeout=0.3)
                written.append(subject)
            except Error:
                pass
        return written

    assert with_client(config, attempt) == []


@pytest.mark.slow
def test_following_goes_on_behind_the_last_message_after_a_restart_of_the_server(tmp_path: Path) -> None:
    with one_server(tmp_path / "nats") as server:
        config = bus_config_of([server])
        set_up(config)
        subjects = [subject_of("default", "finding", "a", "e", str(number)) for number in range(40)]

        async def run(streams: JetStreamContext) -> tuple[list[str], list[str]]:
            for subject in subjects[:20]:
                await publish_once(streams, subject, b"{}", subject, alone=True)
            seen: list[str] = []
            async for batch in follow(streams, events_stream("default"), ">", last_per_subject=True):
                seen += [message.subject for message in batch]
                if len(seen) == 20 and not batch:
                    server.kill()
                    server.start()
                    until(server.is_well, "the server is back")
                    for subject in subjects[20:]:
                        await publish_when_back(streams, subject)
                if len(seen) >= 40:
                    break
            stored = [each.subject async for each in read_all(streams, events_stream("default"), ">")]
            return seen, stored

        seen, stored = with_client(config, run)
        assert seen == stored == subjects


def test_a_consumer_that_answers_and_delivers_nothing_is_replaced(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_connection, "STALLED_S", 2.0)
    config = bus_config_of([server], tenant="stalled")
    set_up(config)
    stream = events_stream(config.tenant)
    subjects = [subject_of(config.tenant, "finding", "a", "e", str(number)) for number in range(8)]

    async def run(streams: JetStreamContext) -> list[str]:
        seen: list[str] = []
        sent = 0
        async for batch in follow(streams, stream, ">", last_per_subject=True):
            seen += [message.subject for message in batch]
            if len(seen) == len(subjects):
                break
            if len(seen) == sent:  # the next one has to come through a consumer that is paused by then
                await pause_consumers(streams, stream)
                await publish_once(streams, subjects[sent], b"{}", subjects[sent], alone=True)
                sent += 1
        return seen

    assert with_client(config, run, timeout_s=120) == subjects


async def pause_consumers(streams: JetStreamContext, stream: str) -> None:
    """Stop delivery of every consumer there is for an hour: requests are answered, messages do not come."""
    until_text = datetime.fromtimestamp(time.time() + 3_600, UTC).isoformat()
    for consumer in await streams.consumers_info(stream):
        request = json.dumps({"pause_until": until_text}).encode()
        answer = await streams._nc.request(f"$JS.API.CONSUMER.PAUSE.{stream}.{consumer.name}", request, timeout=5)
        assert json.loads(answer.data)["paused"]


async def publish_when_back(streams: JetStreamContext, subject: str) -> None:
    for _ in range(50):
        try:
            await publish_once(streams, subject, b"{}", subject, alone=True)
        except (Error, CannotTell):
            await asyncio.sleep(0.1)
        else:
            return
    raise AssertionError("the server did not come back")
