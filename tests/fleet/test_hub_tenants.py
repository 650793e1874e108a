"""Tenants: with a team's credentials, a hub sees that team's engines and nothing else, on every route and subject."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from fastapi.testclient import TestClient
from nats.errors import Error
from nats.js import JetStreamContext

from kvscope.dashboards.web.app import mount
from kvscope.monitor.base.errors import NotKnown, Unreachable
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.fleet.bus_connection import compare_and_put
from kvscope.monitor.fleet.bus_questions import QuestionMessage
from kvscope.monitor.fleet.bus_subjects import BusRole, answer_prefix, hubs_bucket, question_subject
from kvscope.monitor.questions.query import QUESTIONS
from kvscope.monitor.service.hub_server import hub_app
from kvscope.monitor.service.service import ServiceConfig
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import bus_config_of, one_server, set_up, with_client
from tests.fleet.test_nats_streams import seed_file, user
from tests.test_source_set import leaking, running
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


@pytest.mark.slow
def test_a_hub_of_a_team_shows_its_engine_and_nothing_of_another_team(tmp_path: Path) -> None:
    admin, admin_key = seed_file(tmp_path, "admin")
    users = [f'{{ nkey: "{admin_key}" }}']
    seeds: dict[tuple[str, BusRole], Path] = {}
    for tenant in ("team-a", "team-b"):
        for role in ("agent", "hub"):
            seeds[tenant, role], public = seed_file(tmp_path, f"{tenant}-{role}")
            users.append(user(public, tenant, role, f"{tenant}-{role}"))
    with one_server(tmp_path / "nats", f"authorization {{ users: [{', '.join(users)}] }}") as server:

        def config(tenant: str, role: BusRole) -> BusConfig:
            seed = seeds[tenant, role]
            return bus_config_of([server], f"{tenant}-{role}", tenant=tenant, role=role, credentials=seed)

        for tenant in ("team-a", "team-b"):
            set_up(bus_config_of([server], tenant=tenant, credentials=admin))
        (tmp_path / "b").mkdir()
        with (
            leaking(tmp_path / "b") as engine,
            running(ServiceConfig(events=(engine.target,), bus=config("team-b", "agent"))) as agent,
            hub_of(config("team-b", "hub")) as own,
            hub_of(config("team-a", "hub")) as other,
        ):
            until(lambda: own.query.engines() and own.query.findings("firing"), "the engine and its leak at its team")
            name = own.query.engines()[0].engine
            assert own.query.block_map(name).total
            assert_shows_nothing(other, name, own.query.findings("firing")[0].id)
            with pytest.raises(Unreachable):
                other.link.ask("team-b-agent", "block_map", {"engine": name}, 2.0)
            assert agent.bus is not None
            answered = sum(agent.bus.figures().answered.values())
            assert reached_beyond(config("team-a", "hub"), name) == []
            assert reached_beyond(config("team-a", "agent"), name) == []
            assert sum(agent.bus.figures().answered.values()) == answered
            everything = bus_config_of([server], tenant="team-b", credentials=admin)
            assert reached_beyond(everything, name) == ["asked", "answer", "answers", "lease"]


def assert_shows_nothing(hub: object, engine: str, finding: str) -> None:
    """Every question, with the other team's names as arguments, and every route beside them."""
    app = hub_app(hub)  # type: ignore[arg-type]
    mount(app, hub.query)  # type: ignore[attr-defined]
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for question in QUESTIONS.values():
            fields = question.parameters.__struct_fields__
            given = {
                "engine": engine,
                "id": finding,
                "finding": finding,
                "by": "owner",
                "prompt_tokens": 1,
                "max_tokens": 1,
            }
            answer = client.get(question.route, params={key: each for key, each in given.items() if key in fields})
            if answer.status_code == 200:
                assert engine not in answer.text, question.name
                assert finding not in answer.text, question.name
            else:
                assert answer.status_code in (400, 404, 422), (question.name, answer.text)
        assert client.post("/api/sql", json={"engine": engine, "query": "SELECT 1 FROM events"}).status_code == 404
        for route in ("/metrics", "/healthz", "/api/alerts", "/fleet", "/api/openapi.json"):
            assert engine not in client.get(route).text
    with pytest.raises(NotKnown, match="there are: none yet"):
        hub.query.block_map(engine)  # type: ignore[attr-defined]


def reached_beyond(config: BusConfig, engine: str) -> Sequence[str]:
    """What these credentials can do on the subjects of team-b: ask its agent, hear questions, take its hubs' lease."""

    async def attempt(streams: JetStreamContext) -> list[str]:
        found = []
        client = streams._nc
        asked = QuestionMessage(hub="x", question="block_map", arguments={"engine": engine}, timeout_s=1)
        received = await client.subscribe("kvscope.v1.team-b.ask.>")
        replies = await client.subscribe(f"{answer_prefix('team-b', 'team-b-agent')}.x")
        others = await client.subscribe("kvscope.v1.team-b.answer.>")
        await client.publish(
            question_subject("team-b", "team-b-agent"), msgspec.json.encode(asked), reply=replies.subject
        )
        for name, subscription in (("asked", received), ("answer", replies), ("answers", others)):
            try:
                await subscription.next_msg(timeout=0.5)
                found.append(name)
            except Error:
                pass
        try:
            if await compare_and_put(streams, hubs_bucket("team-b"), "alerts", b"{}", 0):
                found.append("lease")
        except Error:
            pass
        return found

    return with_client(config, attempt)
