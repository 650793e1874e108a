"""`monitor hub` over real agents, engines and a real nats-server: the fleet, and questions to agents."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI

from kvscope.monitor.base import limits
from kvscope.monitor.base.errors import BadQuestion, BadTime, NotKnown, Unreachable
from kvscope.monitor.detectors.registry import parse_settings
from kvscope.monitor.fleet.bus_config import BusConfig
from kvscope.monitor.service.hub_server import Hub, _with_threads
from kvscope.monitor.service.service import Service, ServiceConfig
from tests.fleet.fleets import hub_of
from tests.fleet.nats_servers import NatsServer, bus_config_of, one_server, set_up
from tests.test_service import process
from tests.test_source_set import LEAK, leaking, running
from tests.waiting import until

# nats-py leaves the writer of a connection that it lost to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function StreamWriter:pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with one_server(tmp_path_factory.mktemp("nats")) as started:
        set_up(bus_config_of([started]))
        yield started


@pytest.fixture(scope="module")
def watched(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Hub]]:
    """An agent with an engine that leaks, and a hub that shows both."""
    path = tmp_path_factory.mktemp("engine")
    bus = BusConfig((server.url,), agent="agent.1", zone="zone-b", node="gpu-7")
    settings = parse_settings([f"{LEAK}.grace_s=1"])
    with leaking(path) as engine:
        config = ServiceConfig(events=(engine.target,), bus=bus, settings=settings, data=path / "data")
        with running(config) as service, hub_of(bus_config_of([server], "hub-1")) as hub:
            until(lambda: any(each.findings for each in hub.query.engines()), "a finding at the hub")
            assert service.bus is not None
            for pool in (service.bus._answers._threads, hub.query._threads):
                start_all(pool)  # so that no test leaves one behind
            yield service, hub


def start_all(pool: ThreadPoolExecutor) -> None:
    together = threading.Barrier(pool._max_workers)
    wait([pool.submit(together.wait) for _ in range(pool._max_workers)])


def test_the_fleet_shows_the_engine_with_its_harm_its_place_and_its_agent(watched: tuple[Service, Hub]) -> None:
    service, hub = watched
    until(lambda: hub.query.fleet_overview().engines[0].harm != "none", "the harm at the hub")
    (line,) = hub.query.fleet_overview().engines
    (own,) = service.watch.engines()
    assert (line.engine, line.agent, line.zone, line.node) == (own.engine, "agent.1", "zone-b", "gpu-7")
    assert line.harm in ("warning", "error", "critical")
    assert LEAK in line.codes
    until(lambda: hub.query.fleet_overview().engines[0].usage_strip[-1] > 0, "usage in the strip")
    (agent,) = hub.query.fleet_overview().agents
    assert (agent.agent, agent.engines, agent.error) == ("agent.1", 1, "")
    # The same question of the agent itself: its own engine, of no other agent.
    (alone,) = service.watch.fleet_overview().engines
    assert (alone.engine, alone.agent, alone.codes) == (own.engine, "", line.codes)


def test_a_question_about_an_engine_is_answered_as_its_agent_answers(watched: tuple[Service, Hub]) -> None:
    service, hub = watched
    name = service.watch.engines()[0].engine
    at = service.watch.engines()[0].position or ""
    assert hub.query.block_map(name, at) == service.watch.block_map(name, at)
    requests = {each.id for each in hub.query.requests(name, at)}
    assert requests == {each.id for each in service.watch.requests(name, at)}
    (finding,) = [each for each in hub.query.findings("firing") if each.code == LEAK]
    detail = hub.query.finding(finding.id)
    assert detail.points
    block = detail.finding.culprits.blocks[0]
    assert hub.query.block(name, block).ownership_chains
    assert hub.query.explain(name).sentences
    (then,) = hub.query.engines(at, name)
    assert then.position == at
    assert [each.engine for each in hub.query.engines(at)] == [name]
    first = detail.finding.culprits.requests[0]
    found = hub.query.find_request(first, until=at, limit=1_000)
    assert {each.id for each in found.requests} >= {first}
    assert {each.engine for each in found.requests} == {name}
    assert found.is_complete


def test_a_refusal_of_the_agent_is_the_one_that_it_would_raise_itself(watched: tuple[Service, Hub]) -> None:
    service, hub = watched
    name = service.watch.engines()[0].engine
    with pytest.raises(NotKnown, match="no engine 'nothing'"):
        hub.query.block_map("nothing")
    with pytest.raises(NotKnown, match="no block 100000000"):
        hub.query.block(name, 100_000_000)
    with pytest.raises(BadTime):
        hub.query.block_map(name, "yesterday")
    with pytest.raises(BadQuestion, match="is not a kind of event"):
        hub.query.events(name, kinds=["x"])


def test_sql_reads_the_history_of_the_agent_and_no_other_file(watched: tuple[Service, Hub]) -> None:
    service, hub = watched
    name = service.watch.engines()[0].engine
    until(lambda: b'"kinds":0' not in hub.query.sql(name, "SELECT count(DISTINCT kind) AS kinds FROM events"), "events")
    with pytest.raises(BadQuestion):
        hub.query.sql(name, "SELECT * FROM read_text('/etc/passwd')")
    with pytest.raises(BadQuestion, match="one query that reads"):
        hub.query.sql(name, "CREATE TABLE mine (a INTEGER)")


@pytest.mark.slow
def test_an_agent_that_does_not_answer_is_shown_as_such(server: NatsServer, tmp_path: Path) -> None:
    bus = bus_config_of([server], tenant="silent")
    set_up(bus)
    arguments = ("--nats", server.url, "--nats-tenant", "silent", "--nats-agent", "edge", "--port", "0")
    with leaking(tmp_path) as engine, hub_of(bus_config_of([server], "hub", tenant="silent")) as hub:
        with process("kvscope.monitor", "agent", "--events", engine.target, *arguments) as agent:
            until(hub.query.engines, "an engine")
            name = hub.query.engines()[0].engine
            until(lambda: hub.query.block_map(name).total, "an answer")
            agent.send_signal(signal.SIGSTOP)
            until(lambda: hub.query.engines()[0].status == "unknown", "an engine of which nothing is known")
            assert "has sent nothing for" in hub.query.fleet_overview().agents[0].error
            with pytest.raises(Unreachable, match="agent edge did not answer within 2 s"):
                hub.query.block_map(name)
            assert hub.query.fleet_overview().engines[0].status == "unknown"
            agent.send_signal(signal.SIGCONT)
            until(lambda: hub.query.engines()[0].status != "unknown", "an engine that is known")
            assert hub.query.block_map(name).total
            assert hub.query.fleet_overview().agents[0].error == ""
        with pytest.raises(Unreachable, match="is not connected to NATS"):
            hub.query.block_map(name)


def test_as_many_questions_as_a_hub_takes_wait_at_once_and_the_page_goes_on() -> None:
    together = threading.Barrier(limits.HUB_QUESTIONS + 1)

    async def run() -> None:
        async with _with_threads(FastAPI()):
            waiting = [asyncio.to_thread(together.wait, 30) for _ in range(limits.HUB_QUESTIONS)]
            await asyncio.gather(*waiting, asyncio.to_thread(together.wait, 30))

    asyncio.run(run())


@pytest.mark.slow
def test_the_command_serves_page_api_and_metrics(server: NatsServer, watched: tuple[Service, Hub]) -> None:
    name = watched[0].watch.engines()[0].engine
    with process("kvscope.monitor", "hub", "--nats", server.url, "--port", "0") as run:
        assert run.stderr is not None
        line = run.stderr.readline()
        assert "showing tenant default" in line
        with httpx2.Client(base_url=line.split()[2].rstrip(","), trust_env=False, timeout=20) as client:
            until(lambda: client.get("/healthz").json()["complete"], "all that is stored")
            assert client.get("/api/engines").json()[0]["engine"] == name
            assert client.get("/api/block_map", params={"engine": name}).json()["total"] > 0
            assert client.get("/api/block_map", params={"engine": "nothing"}).status_code == 404
            asked = {"engine": name, "query": "SELECT 1 AS one FROM events LIMIT 1"}
            found = client.post("/api/sql", json=asked).json()
            assert found == {"columns": ["one"], "left_out": [], "rows": [{"one": 1}]}
            assert client.post("/api/sql", json={"engine": name}).status_code == 400
            by_address = client.get("/api/sql", params=asked)
            assert (by_address.status_code, by_address.headers["allow"]) == (405, "POST")
            assert 'kvscope_hub_agents{reports="yes"} 1.0' in client.get("/metrics").text
            assert client.get("/fleet").status_code == 200
        run.send_signal(signal.SIGTERM)
        _, stated = run.communicate(timeout=30)
        assert run.returncode == 0, stated
